"""The engine, which runs models. It contains model definitions, weights, steps over blocks, and sampling."""
