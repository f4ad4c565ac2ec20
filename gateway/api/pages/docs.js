// Renders openapi.json: a section for each operation with its fields. Text only ever becomes text nodes.
"use strict";

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function resolved(spec, schema) {
  if (!schema || !schema.$ref) return schema || {};
  return schema.$ref.split("/").slice(1).reduce((at, key) => at[key], spec);
}

function kindOf(spec, schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map((one) => kindOf(spec, one)).join(" or ");
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" or ");
  if (schema.type === "array") return "list of " + (schema.items ? kindOf(spec, schema.items) : "anything");
  return schema.type || "anything";
}

function limitsOf(schema) {
  const found = [schema, ...(schema.anyOf || [])];
  const limits = [];
  for (const one of found) {
    if (one.minimum !== undefined) limits.push("at least " + one.minimum);
    if (one.exclusiveMinimum !== undefined) limits.push("above " + one.exclusiveMinimum);
    if (one.maximum !== undefined) limits.push("at most " + one.maximum);
  }
  return limits.join(", ");
}

function fieldTable(spec, schema) {
  const table = element("table");
  const head = table.appendChild(element("tr"));
  for (const title of ["field", "type", "meaning and limits"]) head.append(element("th", title));
  const required = new Set(schema.required || []);
  for (const [name, field] of Object.entries(schema.properties || {})) {
    const row = table.appendChild(element("tr"));
    const cell = row.appendChild(element("td"));
    cell.append(element("code", name, required.has(name) ? { class: "required" } : {}));
    row.append(element("td", kindOf(spec, field)));
    row.append(element("td", [field.description, limitsOf(field)].filter(Boolean).join(" ")));
  }
  return table;
}

function contentOf(message) {
  return Object.entries((message && message.content) || {});
}

function requestPart(spec, operation, path) {
  const part = document.createDocumentFragment();
  for (const [type, { schema, example }] of contentOf(operation.requestBody)) {
    part.append(element("h3", "Request body (" + type + ")"), fieldTable(spec, resolved(spec, schema)));
    if (example === undefined) continue;
    const body = JSON.stringify(example);
    const line = "curl -s " + location.origin + path + " -H 'content-type: " + type + "' -d '" + body + "'";
    part.append(element("pre", line));
  }
  return part;
}

function answerPart(operation) {
  const part = document.createDocumentFragment();
  const list = element("ul");
  for (const [status, answer] of Object.entries(operation.responses || {})) {
    const types = contentOf(answer).map(([type]) => type).join(", ");
    list.append(element("li", status + ": " + answer.description + (types ? " (" + types + ")" : "")));
  }
  part.append(element("h3", "Answers"), list);
  return part;
}

function section(spec, path, method, operation) {
  const part = element("section", undefined, { id: operation.operationId });
  const title = part.appendChild(element("h2"));
  title.append(element("span", method.toUpperCase(), { class: "method" }), element("code", path));
  part.append(element("p", operation.description || operation.summary));
  part.append(requestPart(spec, operation, path), answerPart(operation));
  return part;
}

async function show() {
  const spec = await (await fetch("openapi.json")).json();
  const about = document.getElementById("about");
  about.replaceChildren(element("span", spec.info.description + " Version " + spec.info.version + ". "));
  about.append(element("a", "openapi.json", { href: "openapi.json" }));
  const contents = document.getElementById("contents").appendChild(element("ul"));
  for (const [path, methods] of Object.entries(spec.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      document.getElementById("operations").append(section(spec, path, method, operation));
      const link = element("a", method.toUpperCase() + " " + path, { href: "#" + operation.operationId });
      contents.appendChild(element("li")).append(link);
    }
  }
}

show().catch((error) => {
  document.getElementById("about").textContent = "openapi.json cannot be shown: " + error.message;
});
