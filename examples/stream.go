// Streams a completion from Go, with the client that `make generated` writes into build/generated/go.
//
// `make test-third-party ARGS="-k go"` builds and runs this file with Go and the libraries from Debian
// (tests/third_party/clients/use_go.py). With grpc-go 1.63 or later, use grpc.NewClient and insecure.NewCredentials.

package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	looseleaf "looseleaf/protos/v1"
)

func main() {
	address := flag.String("address", "127.0.0.1:50051", "the gateway's gRPC address")
	maxTokens := flag.Uint("max-tokens", 32, "the largest number of tokens")
	flag.Parse()

	connection, err := grpc.Dial(*address, grpc.WithInsecure())
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()

	stream, err := looseleaf.NewInferenceServiceClient(connection).Generate(ctx, &looseleaf.GenerateRequest{
		Prompt:   &looseleaf.GenerateRequest_Text{Text: "Once upon a time"},
		Sampling: &looseleaf.SamplingParams{Temperature: proto.Float32(0.8), Seed: proto.Int64(7)},
		Stopping: &looseleaf.StoppingParams{MaxTokens: proto.Uint32(uint32(*maxTokens))},
	})
	if err != nil {
		log.Fatal(err)
	}
	for {
		response, err := stream.Recv()
		if err == io.EOF {
			return
		}
		if err != nil {
			log.Fatal(err)
		}
		fmt.Print(response.TextDelta)
		if response.Usage != nil {
			fmt.Printf("\n\n%d tokens\n", response.Usage.CompletionTokens)
		}
	}
}
