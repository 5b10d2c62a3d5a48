// Small words for building and updating the page. Text gets in by textContent and nothing else, so that no name, error or id can be markup.

export const byId = (id) => document.getElementById(id);

export function element(tag, { className = "", text = "", ...attributes } = {}, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function svgElement(tag, attributes = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// Control characters, and signs that turn the direction of what follows: a name could make its neighbours say something else.
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

// Touches the page only where something changed: selections, focus and screen readers stay where they are.
export function setText(node, words) {
  const text = words.replace(UNSEEN, "\ufffd");
  if (node.textContent !== text) node.textContent = text;
}

export function setData(node, name, value) {
  if (node.dataset[name] !== value) node.dataset[name] = value;
}

// Makes a parent's children those of the items, in their order; the child of an item that was there before is kept.
export function syncRows(parent, items, keyOf, create, update) {
  const known = new Map([...parent.children].map((child) => [child.syncKey, child]));
  let place = parent.firstElementChild;
  const seen = new Set();
  for (const item of items) {
    let key = keyOf(item);
    while (seen.has(key)) key += "\u0000";
    seen.add(key);
    let child = known.get(key);
    if (child === undefined) {
      child = create(item);
      child.syncKey = key;
    }
    update(child, item);
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
    known.delete(key);
  }
  for (const child of known.values()) child.remove();
}
