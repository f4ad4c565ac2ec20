"""`looseleaf serve`: starts every service on one machine, watches the services and replaces a service that ends."""
