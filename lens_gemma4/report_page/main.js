// The bar, and the order in which things are drawn.

function drawBar() {
  const strip = $('strip');
  const n = data.model.n_layers;
  const cells = data.blocks.map((block, i) => el('i', { class: block.kind, ...tipped(`block ${i}, ${kindWords(block)}`) }));
  fill(strip, cells);
  strip.style.maxWidth = `${46 * n}px`;
  strip.setAttribute('aria-valuemin', 0);
  strip.setAttribute('aria-valuemax', n - 1);
  const to = (block) => choose({ block: clamp(block, 0, n - 1) });
  strip.addEventListener('keydown', (event) => {
    const step = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 6, PageDown: -6, Home: -n, End: n }[event.key];
    if (!step || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    to(state.block + step);
  });
  const under = (event) => {
    const at = cells.findIndex((cell) => event.clientX < cell.getBoundingClientRect().right + 1);
    to(at < 0 ? n - 1 : at);
  };
  strip.addEventListener('pointerdown', (event) => { strip.setPointerCapture(event.pointerId); under(event); });
  strip.addEventListener('pointermove', (event) => { if (strip.hasPointerCapture(event.pointerId)) under(event); });
  follow(['block'], () => {
    const block = data.blocks[state.block];
    cells.forEach((cell, i) => cell.classList.toggle('on', i === state.block));
    strip.setAttribute('aria-valuenow', state.block);
    strip.setAttribute('aria-valuetext', `block ${state.block}, ${kindWords(block)}`);
    $('block-value').textContent = `${state.block} of ${n - 1}, ${block.kind}`;
  });
  picker('head-pick', range(data.model.n_heads).map(String), 'head');
  picker('pos-pick', data.tokens.map((_, i) => positionName(i)), 'pos');
}

function picker(id, names, key) {
  const select = $(id);
  fill(select, names.map((text, value) => el('option', { value, text })));
  select.addEventListener('change', () => choose({ [key]: Number(select.value) }));
  follow([key], () => { select.value = state[key]; });
}

// What each head read from the patches of all pictures.
function readFromPictures() {
  const { values } = data.attribution.sources;
  const places = data.images.flatMap((image) => image.positions);
  const length = values.shape[2];
  return range(values.values.length / length).map((i) => places.reduce((sum, pos) => sum + values.values[i * length + pos], 0));
}

// The head that matters most opens the page; with a picture, the one that read most from it.
function opening() {
  const values = data.images.length ? readFromPictures()
    : data.ablation ? data.ablation.effects.values : data.attribution.heads.values.values;
  let best = 0;
  values.forEach((value, i) => { if (Math.abs(value) > Math.abs(values[best])) best = i; });
  const { n_heads } = data.model;
  return { block: Math.floor(best / n_heads), head: best % n_heads, pos: data.tokens.length - 1, part: 'hook_attn_out' };
}

function drawAbout() {
  const cap = data.model.soft_cap;
  const lines = [
    `Logits in the head and in lenses are after the softcap${cap === null ? ' (this model has none)' : ` of ${cap}`}; attribution and ablation are before it, where parts add up.`,
    'Numbers are float32 at least and printed to four digits; attention is printed as kept, in steps of '
      + `${1 / data.patterns.steps}. ␣ is a space, ↵ a line end, ⇥ a tab; bytes stand as <0x..>.`,
    'A lens takes any value as wide as the stream through the model’s final norm, recomputed for it. A length says how large a value is, not how much it matters.',
    'Direct attribution counts the way along the stream alone; what a part does through later blocks is in the ablation map.',
    `Made by lens_gemma4 ${data.version}. The page is one file and asks for nothing from anywhere.`,
  ];
  fill($('about'), lines.map((text) => el('li', { text })));
}

function afterResize(draw) {
  let waiting = 0;
  let width = innerWidth;
  addEventListener('resize', () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { if (innerWidth !== width) { width = innerWidth; draw(); } }, 150);
  });
}

async function start() {
  const read = JSON.parse($('data').textContent);
  const { values, ...patterns } = read.patterns;
  data = await unpackAll({ ...read, patterns });
  data.patterns.values = values; // still packed
  Object.assign(state, opening());
  drawHead();
  drawBar();
  follow(['block', 'part'], drawDiagram);
  follow(['block', 'part', 'pos'], drawDetails);
  drawLensTable();
  follow(['pos'], drawRank);
  drawAttribution();
  drawAblation();
  drawPatternsLede();
  follow(['block', 'head', 'pos'], drawPatterns);
  drawImages();
  drawAbout();
  afterResize(() => { roomOfMain = 0; redraw(); });
  await patternsOf(state.block);
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

start().catch((error) => {
  $('problem').hidden = false;
  $('problem').textContent = `The page could not be drawn: ${error.message}`;
  throw error;
});
