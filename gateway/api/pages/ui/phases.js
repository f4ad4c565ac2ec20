// The phases of an explained request: their names, a bar, and numbers as text.

import { make } from "./dom.js";

export const PHASES = {
  intake: "reading the request",
  gate: "waiting for a place",
  worker: "waiting for a worker",
  prefill_queue: "prefill queue",
  prefill: "prefill",
  pull: "copying between hosts",
  hand_over: "hand-over",
  decode_queue: "decode queue",
  decode: "decode",
  swapped: "preempted: swapped out",
  come_back: "preempted: given back",
  retry: "retry after a lost worker",
  transport: "messages and text",
  delivery: "delivery",
};

export function milliseconds(ns) {
  const ms = ns / 1e6;
  if (ms >= 10000) return `${(ms / 1000).toFixed(1)} s`;
  return ms >= 100 ? `${ms.toFixed(0)} ms` : `${ms.toFixed(1)} ms`;
}

// Returns a bar of a request's phases. `scaleNs` is the time that the full width represents.
export function bar(told, scaleNs = told.total_ns) {
  const spans = told.phases.map((phase) => {
    const span = make("span", { className: `of-${phase.kind}`, title: text(phase) });
    span.style.flexGrow = phase.duration_ns;
    return span;
  });
  const label = told.phases.map(text).join(", ");
  const found = make("div", { className: "bar", role: "img", "aria-label": label }, ...spans);
  found.style.width = `${Math.max(0.5, (100 * told.total_ns) / Math.max(1, scaleNs))}%`;
  return found;
}

export function text(phase) {
  return `${PHASES[phase.kind] ?? phase.kind} ${milliseconds(phase.duration_ns)}`;
}

export function swatch(kind, name) {
  return make("li", {}, make("span", { className: `swatch of-${kind}`, "aria-hidden": "true" }), name);
}
