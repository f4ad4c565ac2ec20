"""Version 1 of the schema: `.proto` files and what protoc made of them (`make proto`)."""
