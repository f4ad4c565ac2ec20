"""Code for tests of promise 1: on every path, a request has the same answer as in a single process without batching."""
