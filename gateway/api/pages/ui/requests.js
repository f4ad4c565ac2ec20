// The list of recent requests: each is a bar of its phases, and a click explains it.

import { get } from "./api.js";
import { byId, make } from "./dom.js";
import { bar, milliseconds, PHASES, swatch, text } from "./phases.js";

const POLL_MS = 1000;
const SHOWN = 50;
let opened = new Set();

export function startRequests() {
  byId("legend").append(...Object.entries(PHASES).map(([kind, name]) => swatch(kind, name)));
}

export function openRequest(id) {
  opened = new Set([id]);
}

// Shows the list until `signal` is aborted.
export async function watchRequests(signal) {
  while (!signal.aborted) {
    const { data } = await get(`/v1/explain?limit=${SHOWN}`);
    if (!signal.aborted) show(data);
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

function show(found) {
  const longest = Math.max(...found.map((told) => told.total_ns), 1);
  byId("no-requests").hidden = found.length > 0;
  const list = byId("list");
  const rows = new Map([...list.children].map((row) => [row.dataset.key, row]));
  const wanted = found.map((told) => {
    const key = `${told.request_id} ${told.received_unix_ns}`;
    const state = `${told.outcome} ${told.total_ns} ${longest}`;
    const before = rows.get(key);
    return before?.dataset.state === state ? before : row(told, key, state, longest, before);
  });
  const focused = document.activeElement?.closest?.(".request")?.dataset.key;
  list.replaceChildren(...wanted);
  if (focused) wanted.find((one) => one.dataset.key === focused)?.querySelector("button").focus();
}

function row(told, key, state, longest, before) {
  const isOpen = opened.delete(told.request_id) || before?.querySelector("button").getAttribute("aria-expanded") === "true";
  const name = make("span", { className: "name" }, `${told.request_id} (${told.outcome})`);
  const time = make("span", { className: "time" }, milliseconds(told.total_ns));
  const button = make("button", { type: "button", "aria-expanded": String(isOpen) }, name, bar(told, longest), time);
  const found = make("div", { className: "request", "data-key": key, "data-state": state }, button);
  if (isOpen) found.append(details(told));
  button.addEventListener("click", () => {
    const open = button.getAttribute("aria-expanded") !== "true";
    button.setAttribute("aria-expanded", String(open));
    if (open) found.append(details(told));
    else found.querySelector(".details").remove();
  });
  return found;
}

function details(told) {
  const phases = told.phases.map((phase) =>
    make("tr", {},
      make("td", {}, make("span", { className: `swatch of-${phase.kind}` }), PHASES[phase.kind] ?? phase.kind),
      make("td", { className: "number" }, milliseconds(phase.duration_ns)),
      make("td", {}, phase.attempt ? `attempt ${phase.attempt}` : "")));
  const where = make("div", {}, make("h3", {}, "Where the time went"), make("table", {}, make("tbody", {}, ...phases)));
  const attempts = told.attempts.map((attempt, index) =>
    make("div", {}, make("h3", {}, `Attempt ${index + 1}: ${attempt.end || "running"}`), table(facts(attempt))));
  const error = told.error ? [make("p", {}, told.error)] : [];
  return make("div", { className: "details" }, where, make("div", {}, ...error, ...attempts));
}

function facts(attempt) {
  const { sources } = attempt;
  const found = [["prefill", choice(attempt.prefill_worker, attempt.prefill_considered)]];
  if (sources) found.push(["prompt's KV", `${sources.cached_tokens} tokens cached, ${sources.computed_tokens} computed`]);
  if (attempt.decode_worker) found.push(["decode", choice(attempt.decode_worker, attempt.decode_considered)]);
  if (attempt.handed_over_blocks) {
    found.push(["handed over", `${attempt.handed_over_blocks} blocks, ${attempt.handed_over_tokens} tokens`]);
  }
  if (sources?.transferred_tokens) found.push(["copied between hosts", `${sources.transferred_tokens} tokens`]);
  if (attempt.copied_blocks) found.push(["copy-on-write", `${attempt.copied_blocks} blocks`]);
  if (attempt.num_swaps) {
    const blocks = `${attempt.swapped_out_blocks} blocks copied out, ${attempt.swapped_in_blocks} copied back`;
    found.push(["swapped out", `${attempt.num_swaps} times: ${blocks}`]);
  }
  found.push(["output", `${attempt.output_tokens} tokens`]);
  return found;
}

// The chosen worker, with the predictions by which it was chosen.
function choice(worker, considered) {
  const compared = considered.map((one) => {
    const delay = one.delay_s ? ` + ${(one.delay_s * 1000).toFixed(1)} ms of delays` : "";
    return `${one.worker_id} ${(one.predicted_s * 1000).toFixed(1)} ms${delay}`;
  });
  return `${worker} (predicted until decode begins: ${compared.join(", ")})`;
}

function table(rows) {
  const shown = rows.map(([name, value]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, value)));
  return make("table", {}, make("tbody", {}, ...shown));
}
