// Small tools, the data, and what is chosen. Text of users reaches the page as text nodes alone.

const $ = (id) => document.getElementById(id);

function element(space, tag, attributes, children) {
  const made = space ? document.createElementNS(space, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null) continue;
    if (name.startsWith('aria-')) made.setAttribute(name, String(value));
    else if (value === false) continue;
    else if (name.startsWith('on')) made.addEventListener(name.slice(2), value);
    else if (name === 'text') made.textContent = value;
    else made.setAttribute(name, value === true ? '' : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}
const el = (tag, attributes, ...children) => element(null, tag, attributes, children);
const svg = (tag, attributes, ...children) =>
  element('http://www.w3.org/2000/svg', tag, attributes, children);
const fill = (place, ...children) => place.replaceChildren(...children.flat().filter(Boolean));

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const range = (n) => Array.from({ length: n }, (_, i) => i);

// -- numbers as text ----------------------------------------------------------------------------------

const MINUS = '\u2212';
const minus = (text) => text.replace(/-/g, MINUS);

// Four digits that count; powers of ten where zeros would hide them.
function number(value) {
  if (value === null || Number.isNaN(value)) return 'n/a';
  if (value === 0) return '0';
  const size = Math.abs(value);
  if (size >= 9999.5 && size < 1e7) return minus(whole(Math.round(value)));
  return minus(size >= 1e-3 && size < 1e4 ? value.toPrecision(4) : value.toExponential(3));
}
const signed = (value) => (value > 0 ? '+' : '') + number(value);

// A share of one in percent, with two places.
function percent(value) {
  return value > 0 && value < 0.00005 ? '<0.01 %' : `${(100 * value).toFixed(2)} %`;
}
const whole = (value) => value.toLocaleString('en').replace(/,/g, '\u202f');

// -- arrays -------------------------------------------------------------------------------------------

class Grid {
  constructor(shape, values) {
    this.shape = shape;
    this.values = values;
    this.strides = shape.map((_, i) => shape.slice(i + 1).reduce((a, b) => a * b, 1));
  }
  at(...place) {
    return this.values[place.reduce((sum, i, axis) => sum + i * this.strides[axis], 0)];
  }
  // The part under the first indices, in the same memory.
  part(...place) {
    const start = place.reduce((sum, i, axis) => sum + i * this.strides[axis], 0);
    const shape = this.shape.slice(place.length);
    return new Grid(shape, this.values.subarray(start, start + shape.reduce((a, b) => a * b, 1)));
  }
}

const KINDS = { f4: Float32Array, i4: Int32Array, u2: Uint16Array, u1: Uint8Array };
const isPacked = (value) => Boolean(value && value.shape && value.type && typeof value.bytes === 'string');

async function unpack(packed) {
  const letters = atob(packed.bytes);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate'));
  const buffer = await new Response(stream).arrayBuffer();
  return new Grid(packed.shape, new KINDS[packed.type](buffer));
}

// Every packed array inside, but those of the patterns: these wait until they are looked at.
async function unpackAll(value) {
  if (!value || typeof value !== 'object') return value;
  if (isPacked(value)) return unpack(value);
  await Promise.all(Object.keys(value).map(async (key) => {
    value[key] = await unpackAll(value[key]);
  }));
  return value;
}

// -- what is chosen -----------------------------------------------------------------------------------

let data = null;
const state = { block: 0, head: 0, pos: 0, part: 'hook_resid_post', sources: 'all', images: 'one' };
const followers = [];

// Call `draw` now and whenever one of `keys` changes.
function follow(keys, draw) {
  followers.push({ keys, draw });
  draw();
}

function choose(change) {
  const changed = Object.keys(change).filter((key) => state[key] !== change[key]);
  Object.assign(state, change);
  for (const { keys, draw } of followers) if (keys.some((key) => changed.includes(key))) draw();
}
const redraw = () => followers.forEach(({ draw }) => draw());

// -- the note at the pointer --------------------------------------------------------------------------

function tip(text, event) {
  const box = $('tip');
  box.hidden = !text;
  if (!text) return;
  box.textContent = text;
  const { width, height } = box.getBoundingClientRect();
  const left = event.clientX + 14 + width > innerWidth ? event.clientX - 14 - width : event.clientX + 14;
  const top = event.clientY + 16 + height > innerHeight ? event.clientY - 12 - height : event.clientY + 16;
  box.style.left = `${Math.max(4, left)}px`;
  box.style.top = `${Math.max(4, top)}px`;
}
const tipped = (text) => ({
  onpointermove: (event) => tip(typeof text === 'function' ? text(event) : text, event),
  onpointerleave: () => tip(''),
});

// -- choices in a row ---------------------------------------------------------------------------------

// One stop of the tab key for a group of things that arrows walk through.
const ARROWS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
function walk(event, members, at, go, steps = ARROWS) {
  const last = members.length - 1;
  let next = null;
  if (event.key in steps) next = clamp(at + steps[event.key], 0, last);
  if (event.key === 'Home') next = 0;
  if (event.key === 'End') next = last;
  if (next === null || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  go(next);
  members[next].focus();
}

function switcher(place, options, key) {
  const buttons = Object.entries(options).map(([value, text]) =>
    el('button', { type: 'button', role: 'radio', text, 'data-value': value, onclick: () => choose({ [key]: value }) }));
  fill(place, buttons);
  place.addEventListener('keydown', (event) => {
    const at = buttons.findIndex((button) => button.dataset.value === state[key]);
    walk(event, buttons, at, (i) => choose({ [key]: buttons[i].dataset.value }));
  });
  follow([key], () => buttons.forEach((button) => {
    const on = button.dataset.value === state[key];
    button.setAttribute('aria-checked', on);
    button.tabIndex = on ? 0 : -1;
  }));
}
