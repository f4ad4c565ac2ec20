// The workers with their loads, and the leases of each arena's holders.

import { get } from "./api.js";
import { byId, make } from "./dom.js";
import { addSample } from "./plots.js";

const POLL_MS = 1000;

export async function watchWorkers(signal) {
  while (!signal.aborted) {
    const found = await get("/v1/workers");
    if (signal.aborted) return;
    addSample(found);
    show(found);
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

function show({ workers, arenas }) {
  byId("worker-list").replaceChildren(...workers.map(card));
  byId("arena-list").replaceChildren(...arenas.filter((arena) => arena.arena_id).map(leases));
}

function card(worker) {
  const isDecode = worker.role === "decode";
  const state = worker.draining ? "draining" : worker.avoided ? "avoided after a failure" : "ready";
  const facts = isDecode
    ? [`${worker.num_running} of ${worker.max_num_seqs} sequences run`, `${worker.num_waiting} wait`, `${worker.num_preempted} swapped out`]
    : [`${worker.waiting_tokens} prompt tokens wait`, worker.prompt_tokens_per_s ? `${worker.prompt_tokens_per_s.toFixed(0)} tokens/s` : "rate not measured yet"];
  if (worker.fallbacks) facts.push(`${worker.fallbacks} fallbacks`);
  const parts = [make("h3", {}, worker.worker_id), make("p", {}, `${worker.role}, ${state}`)];
  if (isDecode) {
    const meter = make("meter", { min: 0, max: worker.max_num_seqs, value: worker.num_running });
    meter.setAttribute("aria-label", "Share of the batch");
    parts.push(meter);
  }
  return make("li", { className: "card" }, ...parts, make("p", { className: "note" }, facts.join(" · ")));
}

function leases(arena) {
  const title = make("h3", {}, `Arena ${arena.arena_id.slice(0, 8)}: ${arena.num_blocks} blocks`);
  if (!arena.holders) return make("div", {}, title, make("p", { className: "note" }, "Only operators see the holders."));
  const head = ["Holder", "Blocks", "Floor", "Lease"].map((name, column) =>
    make("th", { scope: "col", className: column ? "number" : "" }, name));
  const rows = arena.holders.map((holder) =>
    make("tr", {},
      make("td", {}, holder.name),
      make("td", { className: "number" }, String(holder.num_references)),
      make("td", { className: "number" }, String(holder.floor_blocks)),
      make("td", { className: "number" }, `${(holder.lease_ms / 1000).toFixed(1)} s`)));
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows));
  return make("div", {}, title, table);
}
