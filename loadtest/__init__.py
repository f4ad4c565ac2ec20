"""Load tests: locust users for gRPC and HTTP with seeded workloads, and programs that each measure one property of a
served model.
"""
