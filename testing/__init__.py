"""Code for tests and fault injection, such as the oracle and faulty workers. It is not installed with the product."""
