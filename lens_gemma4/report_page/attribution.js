// Who wrote the asked logit: by block, by head, by source token; and what happens without each head.

function drawAttribution() {
  const { parts, heads } = data.attribution;
  $('attribution-lede').textContent = `What each part wrote into the ${data.target} at the last position, before the softcap. Norms are held at this `
    + 'run’s scales and what a block writes is counted times every layer_scalar it passes, so that the parts add up; what they leave over is rounding.';
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const rounding = heads.others.rounding;
  fill($('sums'), [['input', heads.others['0_pre']], ['all heads', sum([...heads.values.values])], ['all MLPs', heads.others.mlps],
    ...(rounding === undefined ? [] : [['rounding of the run', rounding]])].map(([name, value], i) =>
    el('span', {}, i ? el('span', { class: 'soft', text: '+ ' }) : null, `${name} `, el('b', { text: number(value) }))),
  el('span', {}, el('span', { class: 'soft', text: '= ' }), 'sum ', el('b', { text: number(heads.sum) })),
  el('span', { class: 'soft', text: `the run’s own ${number(heads.own)}, remainder ${number(heads.remainder)}` }));
  drawBarNumbers(parts);
  follow(['block'], drawBars);
  const map = () => headMap($('head-map'), heads.values, (value) => signed(value), 'Attribution by block and head');
  withLegend('head-map', map, () => signedLegend(reachOf(heads.values.values), `${data.target}, before the softcap`), ['block', 'head']);
  switcher($('sources-switch'), { all: 'All heads', one: 'Chosen head' }, 'sources');
  follow(['sources', 'block', 'head', 'pos'], drawSources);
}

// A map that is drawn anew when the scheme changes, and marked anew when the choice does.
function withLegend(id, make, legendOf, keys) {
  let map = null;
  follow([], () => {
    map = make();
    $(id).prepend(legendOf());
  });
  follow(keys, () => map.draw());
}

const partAt = (values, block, which) => values[1 + 2 * block + which];

function drawBars() {
  const { values } = data.attribution.parts;
  const box = $('bars');
  const n = data.model.n_layers;
  const wide = blockColumns();
  fill($('bars-caption'), 'By block', [['attn', 'attention'], ['mlp', 'MLP']].map(([kind, text]) =>
    el('span', { class: 'key' }, el('i', { class: kind }), text)), el('span', { class: 'key', text: `input (before block 0): ${signed(values.values[0])}` }));
  const written = values.values.subarray(1);
  const [low, high] = [Math.min(0, ...written), Math.max(0, ...written)];
  const tall = 170;
  const y = (value) => 8 + (tall * (high - value)) / (high - low || 1);
  const drawing = svg('svg', { width: LEFT + n * wide, height: tall + 34, role: 'img', 'aria-label': 'Attribution by block; the numbers stand in the table below' });
  for (const value of ticksOf(low, high)) {
    drawing.append(svg('path', { class: value ? 'axis' : 'axis zero', d: `M${LEFT} ${Math.round(y(value)) + 0.5}H${LEFT + n * wide}` }),
      svg('text', { class: 'tick', x: LEFT - 8, y: y(value) + 4, 'text-anchor': 'end', text: minus(String(value)) }));
  }
  const step = everyOf(n, wide);
  const [pad, thick] = [wide * 0.14, wide * 0.34];
  for (const i of range(n)) {
    const x = LEFT + i * wide;
    ['attn', 'mlp'].forEach((kind, which) => {
      const value = partAt(values.values, i, which);
      drawing.append(svg('rect', { class: kind, x: x + pad + which * (thick + wide * 0.04), width: thick, y: Math.min(y(value), y(0)), height: Math.max(0.6, Math.abs(y(value) - y(0))), rx: 1 }));
    });
    if (i % step === 0) drawing.append(svg('text', { class: data.blocks[i].kind === 'full' ? 'tick full' : 'tick', x: x + wide / 2, y: tall + 28, 'text-anchor': 'middle', text: i }));
    drawing.append(svg('rect', { class: i === state.block ? 'bar-hit on' : 'bar-hit', x, y: 0, width: wide, height: tall + 14, onclick: () => choose({ block: i }),
      ...tipped(`block ${i}: attention ${signed(partAt(values.values, i, 0))}, MLP ${signed(partAt(values.values, i, 1))}`) }));
  }
  fill(box, drawing);
}

// Round numbers between two ends, zero among them.
function ticksOf(low, high) {
  const rough = (high - low || 1) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((m) => m >= rough);
  const found = [];
  for (let k = Math.ceil(low / step); k <= high / step; k++) found.push(Number((k * step).toPrecision(6)));
  return found;
}

function drawBarNumbers({ values }) {
  const line = (tag, texts) => el('tr', {}, texts.map((text) => el(tag, { text })));
  const table = el('table', {}, el('thead', {}, line('th', ['block', 'attention', 'MLP'])), el('tbody', {}, range(data.model.n_layers).map((i) =>
    line('td', [i, signed(partAt(values.values, i, 0)), signed(partAt(values.values, i, 1))]))));
  $('bars-numbers').append(table);
}

// -- by source ----------------------------------------------------------------------------------------

function sourceSums(block = null, head = null) {
  const { values } = data.attribution.sources; // [layer head source]
  const [layers, heads, length] = values.shape;
  const sums = new Float64Array(length);
  for (const i of block === null ? range(layers) : [block]) {
    for (const j of head === null ? range(heads) : [head]) {
      const row = values.part(i, j).values;
      for (let s = 0; s < length; s++) sums[s] += row[s];
    }
  }
  return sums;
}

function drawSources() {
  const all = state.sources === 'all';
  const values = all ? sourceSums() : sourceSums(state.block, state.head);
  const who = all ? 'all heads' : `block ${state.block}, head ${state.head}`;
  const { remainder } = data.attribution.sources;
  fill($('sources-caption'), 'By source token ', el('span', { class: 'light',
    text: `what ${who} gave at the last position, by the token it was read from; in all ${signed(values.reduce((a, b) => a + b, 0))} (remainder ${number(remainder)})` }));
  const reach = reachOf(groups().map((group) => group.places.reduce((sum, pos) => sum + values[pos], 0)));
  tokenText($('sources'), { label: 'Prompt, coloured by what was read from each token', values, colour: (value) => signedColour(value, reach), told: signed });
}

// -- ablation -----------------------------------------------------------------------------------------

function drawAblation() {
  const found = data.ablation;
  if (!found) {
    $('ablation-lede').textContent = 'The map was left out of this report.';
    $('ablation-map').closest('figure').hidden = true;
    return;
  }
  const put = found.mode === 'zero' ? 'zero' : 'its mean over the prompt (without the first token)';
  const where = found.positions === 'last' ? 'at the last position' : 'at every position';
  $('ablation-lede').textContent = `How the ${data.target} (before the softcap, ${number(found.baseline)} in the run) changes when one head’s output is replaced by ${put} `
    + `${where}. Below zero, the head spoke for the answer. Later blocks respond and the post-norm rescales the block’s other heads, so effects need not add up.`;
  $('ablation-caption').textContent = 'Without each head; the chosen one’s pattern is below';
  const map = () => headMap($('ablation-map'), found.effects, (value) => `${signed(value)}, to ${number(found.baseline + value)}`, 'Ablation by block and head');
  withLegend('ablation-map', map, () => signedLegend(reachOf(found.effects.values), `change of the ${data.target}`), ['block', 'head']);
}
