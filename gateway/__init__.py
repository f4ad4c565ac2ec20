"""The service that clients call, over gRPC and HTTP. It validates, tokenizes, limits and routes requests, and returns
their output. It does not import torch.
"""
