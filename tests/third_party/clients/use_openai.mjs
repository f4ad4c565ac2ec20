// The `openai` package from npm.
import OpenAI from 'openai'
import { zodResponseFormat } from 'openai/helpers/zod'
import { z } from 'zod'
import assert from 'node:assert/strict'
import { MODEL, TOOLS_URL, URL, works } from './tried.mjs'

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: 'none', maxRetries: 0 })
const agent = new OpenAI({ baseURL: `${TOOLS_URL}/v1`, apiKey: 'none', maxRetries: 0 })
const messages = [{ role: 'user', content: 'Tell me a story.' }]
const asked = { model: MODEL, messages, max_tokens: 16, temperature: 0 }
const cities = ['Paris', 'Rome']
const parameters = {
  type: 'object',
  properties: { city: { type: 'string', enum: cities } },
  required: ['city'],
  additionalProperties: false,
}
const tools = [{ type: 'function', function: { name: 'get_weather', parameters } }]

await works('models', async () => {
  assert.deepEqual((await client.models.list()).data.map((model) => model.id), [MODEL])
})

await works('completion', async () => {
  const reply = await client.completions.create({ model: MODEL, prompt: 'Once upon a time', max_tokens: 8 })
  assert.ok(reply.choices[0].text)
})

await works('chat, and chat stream with usage', async () => {
  const whole = await client.chat.completions.create(asked)
  const stream = await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } })
  let text = ''
  let usage = null
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? ''
    usage = chunk.usage ?? usage
  }
  assert.equal(text, whole.choices[0].message.content)
  assert.equal(usage.total_tokens, whole.usage.total_tokens)
})

await works('n=2, seed, logprobs', async () => {
  const options = { ...asked, n: 2, seed: 7, temperature: 1, logprobs: true, top_logprobs: 3 }
  const [first, again] = [await client.chat.completions.create(options), await client.chat.completions.create(options)]
  const texts = (reply) => reply.choices.map((choice) => choice.message.content)
  assert.deepEqual(texts(first), texts(again))
  assert.equal(first.choices[1].logprobs.content[0].top_logprobs.length, 3)
})

await works('a stream that is aborted', async () => {
  const stream = await client.chat.completions.create({ ...asked, stream: true, max_tokens: 500 })
  for await (const chunk of stream) if (chunk.choices[0].delta.content) break
  assert.ok(await client.chat.completions.create(asked))
})

await works('runTools(): an enforced call, whose result is sent back', async () => {
  const seen = []
  const weather = { name: 'get_weather', parameters, parse: JSON.parse, function: ({ city }) => seen.push(city) && 'sun' }
  const runner = agent.chat.completions.runTools({
    ...asked, max_tokens: 64, tools: [{ type: 'function', function: weather }],
    tool_choice: { type: 'function', function: { name: 'get_weather' } },
  })
  await runner.done()
  assert.ok(seen.length === 1 && cities.includes(seen[0]))
})

await works('streamed call', async () => {
  const options = { ...asked, max_tokens: 64, tools, tool_choice: 'required', parallel_tool_calls: false, stream: true }
  let json = ''
  for await (const chunk of await agent.chat.completions.create(options)) {
    json += chunk.choices[0]?.delta?.tool_calls?.[0]?.function?.arguments ?? ''
  }
  assert.ok(cities.includes(JSON.parse(json).city))
})

await works('parse() with zod, strict JSON schema', async () => {
  const hero = z.object({ name: z.string().max(12), kind: z.enum(['fox', 'wolf']) })
  const response_format = zodResponseFormat(hero, 'hero')
  const reply = await client.chat.completions.parse({ ...asked, max_tokens: 100, response_format })
  assert.ok(['fox', 'wolf'].includes(reply.choices[0].message.parsed.kind))
})

await works('responses, complete and streamed', async () => {
  const input = { model: MODEL, input: 'Tell me a story.', max_output_tokens: 16, temperature: 0 }
  const whole = await client.responses.create(input)
  let text = ''
  for await (const event of await client.responses.create({ ...input, stream: true })) {
    if (event.type === 'response.output_text.delta') text += event.delta
  }
  assert.equal(text, whole.output_text)
})

await works('errors: BadRequestError with param, NotFoundError', async () => {
  const kind = (error) => [error.constructor.name, error.param ?? error.code]
  const wrong = (fields) => client.chat.completions.create({ ...asked, ...fields }).then(() => null, kind)
  assert.deepEqual(await wrong({ temperature: -1 }), ['BadRequestError', 'temperature'])
  assert.deepEqual(await wrong({ model: 'another' }), ['NotFoundError', 'model'])
})

await works('embeddings', async () => {
  const reply = await client.embeddings.create({ model: MODEL, input: ['wolf', 'fox'] })
  assert.equal(reply.data.length, 2)
  assert.ok(Math.abs(reply.data[0].embedding.reduce((sum, x) => sum + x * x, 0) - 1) < 1e-5)
})

await works('tools in responses: an enforced call, whose result is sent back', async () => {
  const tool = { type: 'function', name: 'get_weather', parameters, strict: true }
  const options = { model: MODEL, tools: [tool], temperature: 0 }
  const input = [{ role: 'user', content: 'Tell me a story.' }]
  const forced = { ...options, tool_choice: 'required', parallel_tool_calls: false }
  const reply = await agent.responses.create({ ...forced, input })
  const call = reply.output[0]
  assert.ok(cities.includes(JSON.parse(call.arguments).city))
  const told = { type: 'function_call_output', call_id: call.call_id, output: 'sun' }
  assert.ok((await agent.responses.create({ ...options, input: [...input, call, told], max_output_tokens: 8 })).usage)
})
