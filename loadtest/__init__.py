"""The load test: seeded workloads, and locust users for gRPC and HTTP, which report TTFT, ITL and E2E separately."""
