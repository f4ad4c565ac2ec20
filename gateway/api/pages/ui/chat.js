// The chat: streams answers, and shows under each where its time and its KV blocks went.

import { explain, postEvents } from "./api.js";
import { byId, make, problem } from "./dom.js";
import { bar, milliseconds } from "./phases.js";

let turns = [];
let running = null;
let showRequest = () => {};

export function startChat(onExplain) {
  showRequest = onExplain;
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("message").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", clear);
}

function clear() {
  running?.abort();
  running = null;
  busy(false);
  turns = [];
  byId("log").replaceChildren();
  byId("message").focus();
}

async function send() {
  const content = byId("message").value.trim();
  if (!content || running) return;
  byId("message").value = "";
  turns = [...turns, { role: "user", content }];
  byId("log").append(make("div", { className: "said user" }, content));
  const stopper = (running = new AbortController());
  busy(true);
  const answer = new AnswerView(count("samples") ?? 1);
  try {
    await answer.stream(body(), stopper.signal);
  } catch (error) {
    if (error.name !== "AbortError") problem(error.message);
    if (error.status) answer.refused = true;
  }
  if (running !== stopper) return; // a new chat has begun
  turns = answer.first ? [...turns, answer.first] : turns.slice(0, -1);
  running = null;
  busy(false);
  if (!answer.refused) return answer.end();
  answer.turn.previousSibling.remove();
  answer.turn.remove();
  byId("message").value = content;
}

function body() {
  const seed = count("seed");
  return {
    messages: turns,
    stream: true,
    n: count("samples") ?? 1,
    temperature: count("temperature") ?? 0.7,
    max_tokens: count("max-tokens") ?? 200,
    ...(seed !== null && { seed }),
  };
}

function count(id) {
  const value = byId(id).value;
  return value === "" ? null : Number(value);
}

function busy(is) {
  byId("stop").hidden = !is;
  byId("send").disabled = is;
  byId("log").setAttribute("aria-busy", String(is));
}

// The view of one sample of an answer. The box shows its reasoning, if there is any, above its content.
class SampleView {
  constructor() {
    this.box = make("div", { className: "said assistant busy" });
    this.content = this.reasoning = "";
    this.thought = null;
  }

  add({ content, reasoning_content: reasoning }) {
    if (reasoning) {
      if (!this.thought) this.box.append((this.thought = make("div", { className: "reasoning" })));
      this.thought.append(reasoning);
      this.reasoning += reasoning;
    }
    if (content) {
      this.box.append(content);
      this.content += content;
    }
  }
}

// The view of one answer: one box for each sample, and the facts about the request.
class AnswerView {
  constructor(samples) {
    this.refused = false; // whether there was an error instead of an answer
    this.id = `page-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
    this.samples = Array.from({ length: samples }, () => new SampleView());
    this.facts = make("div", { className: "facts" });
    const boxes = make("div", { className: "samples" }, ...this.samples.map((sample) => sample.box));
    this.turn = make("div", { className: "turn", "data-request": this.id }, boxes, this.facts);
    byId("log").append(this.turn);
    this.scroll(true);
  }

  // The first sample as a message, or null if it is empty.
  get first() {
    const { content, reasoning } = this.samples[0];
    if (!content && !reasoning) return null;
    return { role: "assistant", content, ...(reasoning && { reasoning_content: reasoning }) };
  }

  async stream(request, signal) {
    for await (const chunk of postEvents("/v1/chat/completions", request, { id: this.id, signal })) {
      for (const choice of chunk.choices) {
        const sample = this.samples[choice.index];
        sample.add(choice.delta ?? {});
        if (choice.finish_reason) sample.box.classList.remove("busy");
      }
      this.scroll(false);
    }
  }

  // Follows the text, unless the reader has scrolled up.
  scroll(always) {
    const log = byId("log");
    if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
  }

  async end() {
    for (const { box } of this.samples) box.classList.remove("busy");
    const told = await explain(this.id).catch(() => null);
    if (told === null) return;
    this.turn.insertBefore(bar(told), this.facts);
    const more = make("button", { type: "button" }, "Explain");
    more.addEventListener("click", () => showRequest(this.id));
    this.facts.replaceChildren(...facts(told).map((fact) => make("span", {}, fact)), more);
    this.scroll(false);
  }
}

function facts(told) {
  const { usage, attempts } = told;
  const found = [];
  if (usage) {
    const cached = usage.sources?.cached_tokens ?? 0;
    found.push(`${usage.prompt_tokens} prompt tokens, ${cached} cached`, `${usage.completion_tokens} tokens`);
    const decodeNs = told.timings.decode_ns;
    const rate = (usage.completion_tokens - told.num_sequences) / (decodeNs / 1e9);
    if (decodeNs > 0 && rate > 0) found.push(`${rate.toFixed(0)} tokens/s`);
  }
  if (told.first_token_ns !== undefined) found.push(`first after ${milliseconds(told.first_token_ns)}`);
  found.push(`total ${milliseconds(told.total_ns)}`);
  const last = attempts.at(-1);
  if (last) found.push([last.prefill_worker, last.decode_worker].filter(Boolean).join(" → "));
  if (attempts.length > 1) found.push(`${attempts.length} attempts`);
  return found;
}
