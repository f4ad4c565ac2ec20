// The gateway's HTTP API: JSON, server-sent events, and the API key of this browser tab.

const KEY = "looseleaf-key";

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

async function call(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key && { authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw new ApiError(body.error?.message ?? `${path} answers with status ${response.status}`, response.status);
}

export async function get(path) {
  return (await call(path)).json();
}

// Yields the decoded data of a stream of server-sent events. `options` are those of fetch.
export async function* events(path, options) {
  const reader = (await call(path, options)).body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]" || !part.startsWith("data: ")) continue;
      const found = JSON.parse(data);
      if (found.error) throw new ApiError(found.error.message, 0);
      yield found;
    }
  }
}

export function postEvents(path, body, { id, signal }) {
  const headers = { "content-type": "application/json", "x-request-id": id };
  return events(path, { method: "POST", body: JSON.stringify(body), headers, signal });
}

export async function explain(id) {
  return (await get(`/v1/explain/${encodeURIComponent(id)}`)).data[0];
}
