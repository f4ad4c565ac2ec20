// The map of blocks: live states, the blocks of the caller's requests, and what the ledger says about one block.

import { events, get } from "./api.js";
import { BlockMap, STATES } from "./block_map.js";
import { byId, make } from "./dom.js";
import { milliseconds } from "./phases.js";

const POLL_MS = 1000;
const SHOWN = 12;
const ASK_MS = 120;

let map;
let stride = 1;
let arena = "";
let index = 0; // the arena's position in /v1/workers
let chosen = null;
let asking;

export function startBlocks() {
  map = new BlockMap(byId("map"), (cell) => {
    clearTimeout(asking);
    if (cell !== null) asking = setTimeout(() => describe(cell), ASK_MS);
  });
  for (const name of Object.values(STATES)) {
    const swatch = make("span", { className: `swatch of-${name}`, "aria-hidden": "true" });
    byId("states").append(make("li", {}, swatch, make("b", { id: `count-${name}` }, "0"), ` ${name}`));
  }
}

export async function watchBlocks(signal) {
  await offerArenas();
  const ended = new AbortController(); // ends one watch after an error in the other
  const either = AbortSignal.any([signal, ended.signal]);
  try {
    await Promise.all([watchArena(either), watchTables(either)]);
  } finally {
    ended.abort();
  }
}

// Shows the chosen arena, and another one after each choice.
async function watchArena(signal) {
  while (!signal.aborted) {
    const left = new AbortController();
    byId("arena-choice").onchange = () => left.abort();
    index = Math.max(byId("arena-choice").selectedIndex, 0);
    try {
      for await (const event of events(`/v1/blocks?arena=${index}`, { signal: AbortSignal.any([signal, left.signal]) })) show(event);
      return;
    } catch (error) {
      if (!left.signal.aborted) throw error;
    }
  }
}

// Offers a choice if there are several arenas: one for each host.
async function offerArenas() {
  const { arenas } = await get("/v1/workers");
  const names = arenas.map((found, place) => `${place + 1}: ${found.arena_id.slice(0, 8) || "no worker yet"}`);
  const chosen = Math.min(Math.max(byId("arena-choice").selectedIndex, 0), arenas.length - 1);
  byId("arena-choice").replaceChildren(...names.map((name) => make("option", {}, name)));
  byId("arena-choice").selectedIndex = chosen;
  byId("which").hidden = arenas.length < 2;
}

function show(event) {
  stride = event.stride;
  arena = event.arena_id;
  for (const [name, count] of Object.entries(event.counts)) byId(`count-${name}`).textContent = count;
  const size = `${event.num_blocks} blocks of ${event.block_size} tokens, ${event.block_bytes.toLocaleString("en")} bytes each`;
  byId("arena").textContent = arena ? size + (stride > 1 ? `; every ${stride}th is shown` : "") : "There is no arena yet.";
  if (event.states) map.setAll(Uint8Array.from(atob(event.states), (char) => char.charCodeAt(0)));
  else if (event.changed) map.change(event.changed, event.to);
}

// Shows what the ledger says about the block of a cell.
async function describe(cell) {
  const block = await get(`/v1/blocks/${cell * stride}?arena=${index}`).catch((error) => ({ error }));
  if (block.error) {
    byId("block").textContent = block.error.message;
    return;
  }
  const age = ((performance.now() - map.changedAt[cell]) / 1000).toFixed(1);
  const parts = [`Block ${block.block}: ${block.state}`, `generation ${block.generation}`, `unchanged for at least ${age} s`];
  if (block.holders) parts.push(block.holders.length ? `held by ${block.holders.join(", ")}` : "no holder");
  else parts.push(`${block.num_holders} holders`);
  if (block.prefix_hash) parts.push(`prefix ${block.prefix_hash.slice(0, 12)}`);
  byId("block").textContent = parts.join(" · ");
}

// Keeps the list of requests and the lit cells up to date.
async function watchTables(signal) {
  while (!signal.aborted) {
    const { data } = await get(`/v1/explain?limit=${SHOWN}`);
    if (signal.aborted) return;
    showTables(data.filter((told) => told.attempts.at(-1)?.arena_id === arena && told.attempts.at(-1).blocks.length));
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

// Returns the references of a request's last attempt: each is a block in one generation.
function refsOf(told) {
  const { blocks, generations } = told.attempts.at(-1);
  return blocks.map((block, i) => ({ block, name: `${block} ${generations[i]}` }));
}

function showTables(found) {
  const shown = found.filter((told) => (chosen === null ? told.outcome === "running" : told.request_id === chosen));
  const uses = new Map();
  for (const told of found) for (const { name } of refsOf(told)) uses.set(name, (uses.get(name) ?? 0) + 1);
  const lit = new Map();
  for (const { block, name } of shown.flatMap(refsOf)) if (block % stride === 0) lit.set(block / stride, uses.get(name));
  map.light(lit);
  const focused = document.activeElement?.closest?.("#tables button")?.dataset.request;
  byId("tables").replaceChildren(...found.map((told) => table(told, uses, found)));
  if (focused) byId("tables").querySelector(`[data-request="${CSS.escape(focused)}"]`)?.focus();
  byId("no-tables").hidden = found.length > 0;
}

function table(told, uses, found) {
  const refs = refsOf(told);
  const shared = refs.filter(({ name }) => uses.get(name) > 1).length;
  const isChosen = chosen === told.request_id;
  const facts = `${refs.length} blocks, ${shared} shared · ${told.outcome} · ${milliseconds(told.total_ns)}`;
  const button = make("button", { type: "button", "aria-pressed": String(isChosen), "data-request": told.request_id },
    make("span", { className: "name" }, told.request_id), make("span", { className: "time" }, facts));
  button.addEventListener("click", () => {
    chosen = isChosen ? null : told.request_id;
    showTables(found);
  });
  return make("li", {}, button);
}
