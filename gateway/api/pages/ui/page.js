// The page: its tabs, and the API key.

import { get, setKey } from "./api.js";
import { startBlocks, watchBlocks } from "./blocks.js";
import { startChat } from "./chat.js";
import { byId, problem } from "./dom.js";
import { startPlots } from "./plots.js";
import { openRequest, startRequests, watchRequests } from "./requests.js";
import { watchWorkers } from "./workers.js";

const RETRY_MS = 2000;
const tabs = [...document.querySelectorAll("[role=tab]")];
const watches = { requests: watchRequests, blocks: watchBlocks, workers: watchWorkers };
let watching = new AbortController();

function select(name, { focus = false } = {}) {
  watching.abort();
  for (const tab of tabs) {
    const is = tab.getAttribute("aria-controls") === name;
    tab.setAttribute("aria-selected", String(is));
    tab.tabIndex = is ? 0 : -1;
    byId(tab.getAttribute("aria-controls")).hidden = !is;
    if (is && focus) tab.focus();
  }
  location.replace(`#${name}`);
  if (watches[name]) watch(watches[name], (watching = new AbortController()).signal);
}

// Runs a view's watch until the view is left. After an error, tries again.
async function watch(run, signal) {
  while (!signal.aborted) {
    try {
      return await run(signal);
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401) return askForKey();
      problem(error.message);
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }
}

function step(event) {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (by === undefined) return;
  const at = tabs.indexOf(event.currentTarget);
  select(tabs[(at + by + tabs.length) % tabs.length].getAttribute("aria-controls"), { focus: true });
}

function askForKey() {
  if (!byId("ask").open) byId("ask").showModal();
}

async function begin() {
  try {
    const { data } = await get("/v1/models");
    byId("model").textContent = data[0].id;
    const name = location.hash.slice(1);
    select(tabs.some((tab) => tab.getAttribute("aria-controls") === name) ? name : "chat");
  } catch (error) {
    if (error.status === 401) askForKey();
    else problem(error.message);
  }
}

for (const tab of tabs) {
  tab.addEventListener("click", () => select(tab.getAttribute("aria-controls")));
  tab.addEventListener("keydown", step);
}
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value);
  byId("ask").close();
  begin();
});
startChat((id) => {
  openRequest(id);
  select("requests", { focus: true });
});
startRequests();
startBlocks();
startPlots();
begin();
