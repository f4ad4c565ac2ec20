// Streams a completion from Node: `npm install --prefix examples`, then `node examples/stream.mjs [GRPC_ADDRESS]`.
//
// The protos are read at run time. `make generated` shows how to generate TypeScript and Go from them instead.

import { fileURLToPath } from "node:url";

import * as grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

const [address = "127.0.0.1:50051"] = process.argv.slice(2);
const root = fileURLToPath(new URL("..", import.meta.url));
const definition = loadSync("protos/v1/inference.proto", { includeDirs: [root], oneofs: true });
const { InferenceService } = grpc.loadPackageDefinition(definition).looseleaf.v1;

const client = new InferenceService(address, grpc.credentials.createInsecure());
const request = {
  text: "Once upon a time",
  sampling: { temperature: 0.8, seed: 7 },
  stopping: { maxTokens: 32 },
};
const stream = client.Generate(request, { deadline: Date.now() + 60_000 });
try {
  for await (const response of stream) {
    process.stdout.write(response.textDelta);
    if (response.usage) console.log(`\n\n${response.usage.completionTokens} tokens`);
  }
} finally {
  client.close();
}
