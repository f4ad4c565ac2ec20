"""Streams a completion with only `grpcio` and the generated stubs: `python examples/plain_grpc.py [GRPC_ADDRESS]`.

Clients in other languages can be generated from `protos/v1/inference.proto` in the same way.
"""

from __future__ import annotations

import sys

import grpc

from protos.v1 import inference_pb2, inference_pb2_grpc, types_pb2


def main(address: str = "127.0.0.1:50051") -> None:
    request = inference_pb2.GenerateRequest(
        text="Once upon a time",
        sampling=types_pb2.SamplingParams(temperature=0.8, seed=7),
        stopping=types_pb2.StoppingParams(max_tokens=32),
    )
    with grpc.insecure_channel(address) as channel:
        service = inference_pb2_grpc.InferenceServiceStub(channel)
        for response in service.Generate(request, timeout=60):
            print(response.text_delta, end="", flush=True)
            if response.HasField("usage"):
                print(f"\n\n{response.usage.completion_tokens} tokens in {response.timings.decode_ns / 1e6:.0f} ms")


if __name__ == "__main__":
    main(*sys.argv[1:])
