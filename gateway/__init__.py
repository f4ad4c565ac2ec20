"""The service that clients call, over gRPC and HTTP. It validates, tokenizes, limits and routes requests, and streams
their answers. It does not import torch.
"""
