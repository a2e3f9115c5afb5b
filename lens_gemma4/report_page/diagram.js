// The block as a drawing: the stream runs through, attention and MLP read from it and add to it.

const LANES = { q: 30, k: 80, v: 130 };
// part: [x of the left side, y of the middle, width, label]
const NODES = {
  hook_resid_pre: [4, 190, 88, 'resid_pre'],
  'ln1.hook_out': [104, LANES.k, 54, 'ln1'],
  'attn.hook_q': [194, LANES.q, 44, 'q'],
  'attn.hook_k': [194, LANES.k, 44, 'k'],
  'attn.hook_v': [194, LANES.v, 44, 'v'],
  'attn.q_norm.hook_out': [262, LANES.q, 70, 'q_norm'],
  'attn.k_norm.hook_out': [262, LANES.k, 70, 'k_norm'],
  'attn.v_norm.hook_out': [262, LANES.v, 70, 'v_norm'],
  'attn.hook_rot_q': [356, LANES.q, 60, 'rot_q'],
  'attn.hook_rot_k': [356, LANES.k, 60, 'rot_k'],
  'attn.hook_attn_scores': [446, 55, 66, 'scores'],
  'attn.hook_pattern': [534, 55, 100, 'pattern'],
  'attn.hook_z': [654, 92, 36, 'z'],
  'attn.hook_out': [710, 92, 44, 'out'],
  hook_attn_out: [774, 92, 82, 'ln1_post'],
  hook_resid_mid: [4, 346, 88, 'resid_mid'],
  'ln2.hook_out': [104, 280, 54, 'ln2'],
  'mlp.hook_pre': [204, 256, 56, 'pre'],
  'mlp.hook_act': [292, 256, 50, 'act'],
  'mlp.hook_pre_linear': [204, 304, 92, 'pre_linear'],
  'mlp.hook_post': [388, 280, 56, 'post'],
  'mlp.hook_out': [710, 280, 44, 'out'],
  hook_mlp_out: [774, 280, 82, 'ln2_post'],
  hook_resid_sum: [716, 402, 90, 'resid_sum'],
  layer_scalar: [540, 402, 128, ''],
  hook_resid_post: [4, 402, 92, 'resid_post'],
};
const ON_STREAM = new Set(['hook_resid_pre', 'hook_resid_mid', 'hook_resid_sum', 'hook_resid_post']);
const TALL = 28;
const PLUS = 882;

const leftOf = (part) => NODES[part][0];
const rightOf = (part) => NODES[part][0] + NODES[part][2];
const yOf = (part) => NODES[part][1];

// From one part to another: across, then up or down just before it.
function wire(from, to, kind = '') {
  const [x, y, x2, y2] = [rightOf(from), yOf(from), leftOf(to), yOf(to)];
  const bend = x2 - 14;
  return svg('path', { class: `wire ${kind}`, d: y === y2 ? `M${x} ${y}H${x2}` : `M${x} ${y}H${bend}V${y2}H${x2}`, 'marker-end': 'url(#tip-mark)' });
}

function wires(block) {
  const straight = [
    ['attn.hook_q', 'attn.q_norm.hook_out'], ['attn.q_norm.hook_out', 'attn.hook_rot_q'],
    ['attn.hook_k', 'attn.k_norm.hook_out'], ['attn.k_norm.hook_out', 'attn.hook_rot_k'],
    ['attn.hook_v', 'attn.v_norm.hook_out'], ['attn.hook_rot_q', 'attn.hook_attn_scores'],
    ['attn.hook_rot_k', 'attn.hook_attn_scores'], ['attn.hook_attn_scores', 'attn.hook_pattern'],
    ['attn.hook_pattern', 'attn.hook_z'], ['attn.v_norm.hook_out', 'attn.hook_z'], ['attn.hook_z', 'attn.hook_out'],
    ['attn.hook_out', 'hook_attn_out'], ['mlp.hook_pre', 'mlp.hook_act'], ['mlp.hook_act', 'mlp.hook_post'],
    ['mlp.hook_pre_linear', 'mlp.hook_post'], ['mlp.hook_post', 'mlp.hook_out'], ['mlp.hook_out', 'hook_mlp_out'],
    ['ln2.hook_out', 'mlp.hook_pre'], ['ln2.hook_out', 'mlp.hook_pre_linear'],
  ];
  const lent = block.lender !== null;
  const borrowed = (part) => /attn\.(hook_k|k_norm|hook_v$|hook_rot_k|v_norm)/.test(part);
  const drawn = straight.map(([from, to]) => wire(from, to, lent && borrowed(from) && borrowed(to) ? 'lent' : ''));
  drawn.push(wire('ln1.hook_out', 'attn.hook_q'));
  if (!lent) drawn.push(wire('ln1.hook_out', 'attn.hook_k'));
  if (!lent && !block.k_eq_v) drawn.push(wire('ln1.hook_out', 'attn.hook_v'));
  if (!lent && block.k_eq_v) { // values are the keys' projection
    drawn.push(svg('path', { class: 'wire', d: `M216 ${LANES.k + TALL / 2}V${LANES.v - TALL / 2}`, 'marker-end': 'url(#tip-mark)' }));
  }
  for (const [from, to] of [['hook_resid_pre', 'ln1.hook_out'], ['hook_resid_mid', 'ln2.hook_out']]) {
    const x = leftOf(to) + 27;
    drawn.push(svg('path', { class: 'wire', d: `M${x} ${yOf(from)}V${yOf(to) + TALL / 2}`, 'marker-end': 'url(#tip-mark)' }));
  }
  for (const [from, y] of [['hook_attn_out', 190], ['hook_mlp_out', 346]]) {
    drawn.push(svg('path', { class: 'wire', d: `M${rightOf(from)} ${yOf(from)}H${PLUS}V${y - 11}`, 'marker-end': 'url(#tip-mark)' }));
  }
  return drawn;
}

const STREAM = [
  `M48 190H${PLUS}V216H48V346`,
  `M48 346H${PLUS}V402H50`,
];

function plus(y) {
  return svg('g', { class: 'plus' }, svg('circle', { cx: PLUS, cy: y, r: 10 }),
    svg('path', { d: `M${PLUS - 5} ${y}H${PLUS + 5}M${PLUS} ${y - 5}V${y + 5}` }));
}

// What each query sees: a triangle, or a band of it.
function maskIcon(kind) {
  const [x, y, side] = [NODES['attn.hook_pattern'][0] + 10, yOf('attn.hook_pattern') - 9, 18];
  const shape = kind === 'full' ? `M${x} ${y}V${y + side}H${x + side}Z`
    : `M${x} ${y}V${y + 6}L${x + side - 6} ${y + side}H${x + side}Z`;
  return [svg('rect', { class: 'icon frame', x, y, width: side, height: side }), svg('path', { class: 'icon', d: shape })];
}

function node(part, block) {
  const [x, y, width, label] = NODES[part];
  const text = part === 'layer_scalar' ? `× ${number(block.layer_scalar)}` : label;
  const absent = part === 'layer_scalar' ? null : data.parts.find((one) => one.part === part).absent[state.block];
  const on = state.part === part;
  const made = svg('g', {
    class: `node${ON_STREAM.has(part) ? ' on-stream' : ''}${absent ? ' absent' : ''}`, role: 'radio', 'data-part': part,
    tabindex: on ? 0 : -1, 'aria-checked': on, 'aria-label': part === 'layer_scalar' ? `layer_scalar ${text}` : label,
    onclick: () => choose({ part }),
  });
  made.append(svg('rect', { x, y: y - TALL / 2, width, height: TALL, rx: ON_STREAM.has(part) ? 14 : 5 }));
  const shift = part === 'attn.hook_pattern' ? 13 : 0;
  if (shift) made.append(...maskIcon(block.kind));
  made.append(svg('text', { x: x + width / 2 + shift, y: y + 1, text }));
  return made;
}

function blockFacts(block) {
  const values = block.lender !== null ? `, keys and values of block ${block.lender}`
    : block.k_eq_v ? ', values are the keys’ projection' : '';
  const kv = block.n_key_value_heads;
  return `${block.n_heads} query heads of ${block.d_head}, ${kv} key/value head${kv > 1 ? 's' : ''}${values}; MLP ${whole(block.d_mlp)}. `
    + `What it writes reaches the end times ${number(block.gain)}. Choose a part.`;
}
const kindWords = (block) => (block.kind === 'full' ? 'full attention' : `sliding attention, window ${whole(block.window)}`);

function drawDiagram() {
  const block = data.blocks[state.block];
  $('h-block').textContent = `Block ${state.block}: ${kindWords(block)}`;
  $('block-facts').textContent = blockFacts(block);
  const mark = svg('marker', { id: 'tip-mark', viewBox: '0 0 8 8', refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: 'auto' },
    svg('path', { d: 'M0 .8L7 4L0 7.2', class: 'wire-tip' }));
  const parts = Object.keys(NODES);
  const nodes = parts.map((part) => node(part, block));
  const drawing = svg('svg', { viewBox: '0 0 904 424', role: 'radiogroup', 'aria-label': `Parts of block ${state.block}` },
    svg('defs', {}, mark), STREAM.map((d) => svg('path', { class: 'stream', d })), wires(block), plus(190), plus(346),
    svg('text', { class: 'group', x: 104, y: 34, text: 'attention' }), svg('text', { class: 'group', x: 104, y: 250, text: 'MLP' }), nodes);
  drawing.addEventListener('keydown', (event) => {
    const at = parts.indexOf(state.part);
    walk(event, nodes, at, (i) => { choose({ part: parts[i] }); });
  });
  const focused = $('diagram').contains(document.activeElement);
  fill($('diagram'), drawing);
  if (focused) nodes[parts.indexOf(state.part)].focus();
}
