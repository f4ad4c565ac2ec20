// Vercel's `ai` package with @ai-sdk/openai-compatible, and with @ai-sdk/openai, which uses the Responses API by
// default.
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { Output, embedMany, generateText, isStepCount, streamText, tool } from 'ai'
import { z } from 'zod'
import assert from 'node:assert/strict'
import { MODEL, TOOLS_URL, URL, works } from './tried.mjs'

const options = { name: 'looseleaf', apiKey: 'none', includeUsage: true, supportsStructuredOutputs: true }
const provider = createOpenAICompatible({ ...options, baseURL: `${URL}/v1` })
const agent = createOpenAICompatible({ ...options, baseURL: `${TOOLS_URL}/v1` })
const openai = createOpenAI({ baseURL: `${URL}/v1`, apiKey: 'none' })
const ask = { prompt: 'Tell me a story.', maxOutputTokens: 24, temperature: 0, maxRetries: 0 }
const hero = z.object({ name: z.string().max(12), kind: z.enum(['fox', 'wolf']) })

async function sameStreamed(model) {
  const whole = await generateText({ ...ask, model })
  const stream = streamText({ ...ask, model, onError: ({ error }) => { throw error } })
  let text = ''
  for await (const part of stream.textStream) text += part
  assert.ok(text)
  assert.equal(text, whole.text)
  assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens)
}

await works('generateText, streamText with usage', () => sameStreamed(provider(MODEL)))

await works('completionModel', () => sameStreamed(provider.completionModel(MODEL)))

await works('@ai-sdk/openai: default (responses)', () => sameStreamed(openai(MODEL)))

await works('@ai-sdk/openai: chat, completion', async () => {
  await sameStreamed(openai.chat(MODEL))
  await sameStreamed(openai.completion(MODEL))
})

await works('tools: an enforced call, which is run and whose result is sent back', async () => {
  const seen = []
  const inputSchema = z.object({ city: z.enum(['Paris', 'Rome']) })
  const weather = tool({ inputSchema, execute: async ({ city }) => { seen.push(city); return 'sun' } })
  const reply = await generateText({
    ...ask, model: agent(MODEL), maxOutputTokens: 100, tools: { weather }, stopWhen: isStepCount(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? 'auto' : { type: 'tool', toolName: 'weather' } }),
  })
  assert.ok(reply.steps.length === 2 && ['Paris', 'Rome'].includes(seen[0]))
})

await works('streamed call', async () => {
  const weather = tool({ inputSchema: z.object({ city: z.enum(['Paris', 'Rome']) }) })
  const toolChoice = { type: 'tool', toolName: 'weather' }
  const stream = streamText({ ...ask, model: agent(MODEL), maxOutputTokens: 100, tools: { weather }, toolChoice })
  const [call] = await stream.toolCalls
  assert.ok(['Paris', 'Rome'].includes(call.input.city))
})

await works('Output.object, complete and streamed', async () => {
  const options = { ...ask, model: provider(MODEL), maxOutputTokens: 100, output: Output.object({ schema: hero }) }
  const reply = await generateText(options)
  assert.ok(['fox', 'wolf'].includes(reply.output.kind))
  let last = null
  for await (const part of streamText(options).partialOutputStream) last = part
  assert.deepEqual(last, reply.output)
})

await works('Output.choice', async () => {
  const output = Output.choice({ options: ['fox', 'wolf'] })
  const reply = await generateText({ ...ask, model: provider(MODEL), maxOutputTokens: 50, output })
  assert.ok(['fox', 'wolf'].includes(reply.output))
})

await works('errors: APICallError with the reason', async () => {
  const error = await generateText({ ...ask, model: provider('another') }).catch((caught) => caught)
  assert.equal(error.statusCode, 404)
  assert.match(error.message, /another/)
})

await works('embedMany', async () => {
  const { embeddings } = await embedMany({ model: provider.embeddingModel(MODEL), values: ['wolf', 'fox'], maxRetries: 0 })
  assert.ok(embeddings.length === 2 && embeddings[0].length > 8)
})

await works('@ai-sdk/openai: default (responses) with tools', async () => {
  const model = createOpenAI({ baseURL: `${TOOLS_URL}/v1`, apiKey: 'none' })(MODEL)
  const weather = tool({ inputSchema: z.object({ city: z.enum(['Paris', 'Rome']) }) })
  const toolChoice = { type: 'tool', toolName: 'weather' }
  const reply = await generateText({ ...ask, model, maxOutputTokens: 100, tools: { weather }, toolChoice })
  assert.ok(['Paris', 'Rome'].includes(reply.toolCalls[0].input.city))
})
