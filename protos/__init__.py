"""The protobuf schema and the code generated from it."""
