"""Version 1 of the schema: the `.proto` files and the code that protoc generates from them (`make proto`)."""
