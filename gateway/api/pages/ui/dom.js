// Creates and finds elements, and shows error messages.

// Returns an element. `props` are properties, except `aria-*` and `data-*`, which are attributes.
export function make(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.includes("-")) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

export const byId = (id) => document.getElementById(id);

let timer;
export function problem(text) {
  const shown = byId("problem");
  shown.textContent = text;
  shown.hidden = false;
  clearTimeout(timer);
  timer = setTimeout(() => (shown.hidden = true), 8000);
}
