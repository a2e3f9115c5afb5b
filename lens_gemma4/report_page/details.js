// One part of the chosen block at the chosen position: its names, its length, what it gives, what the head says of it.

function drawDetails() {
  const scalar = state.part === 'layer_scalar';
  fill($('details'), ...(scalar ? scalarDetails() : partDetails()));
}

const here = (name) => name.replace('{i}', state.block);
const rows = (pairs) => el('dl', {}, pairs.flatMap(([what, text, kind]) =>
  [el('dt', { text: what }), el('dd', { class: kind || '', text })]));
const title = (name, meaning) => [el('h3', { text: name }), el('p', { text: meaning })];
const figure = (value, what) => [el('div', { class: 'big', text: value }), el('div', { class: 'what', text: what })];

function scalarDetails() {
  const block = data.blocks[state.block];
  return [
    el('div', {}, title('layer_scalar', 'multiplies the whole stream at the end of the block'),
      rows([['ours', `blocks.${state.block}.layer_scalar`, 'name'], ['transformers', `layers.${state.block}.layer_scalar`, 'name'],
        ['shape', '1 (a stored buffer, no hook point)']])),
    el('div', {}, figure(number(block.layer_scalar), 'this block’s scalar'),
      figure(number(block.gain), 'what the block writes reaches the end times this: the product with all later scalars')),
    el('div', {}),
  ];
}

function partDetails() {
  const part = data.parts.find((one) => one.part === state.part);
  const names = [['ours', [part.name, ...part.same].map(here).join('\n'), 'name'],
    ['standard', part.standard.map(here).join('\n') || 'none', part.standard.length ? 'name' : ''],
    ['transformers', here(part.transformers) || 'no module of its own', part.transformers ? 'name' : '']];
  const shape = part.shapes[state.block];
  const short = part.part.replace('.hook_out', '').replace('hook_', '');
  const heading = title(part.part === 'attn.hook_out' || part.part === 'mlp.hook_out' ? part.part : short, part.meaning);
  if (part.absent[state.block]) {
    return [el('div', {}, heading, rows(names)), el('div', {}, el('p', { class: 'sub', text: `Not here: ${part.absent[state.block]}.` })), el('div', {})];
  }
  names.push(['shape', `${shape.join(' × ')} (${part.axes.replace(/ /g, ', ')})`]);
  return [el('div', {}, heading, rows(names)), el('div', {}, measured(part)), el('div', {}, lensOf(part))];
}

function measured(part) {
  const found = [el('p', { class: 'sub', text: `At position ${positionName(state.pos)}` })];
  if (part.part.startsWith('attn.hook_attn') || part.part === 'attn.hook_pattern') {
    return [...found, el('p', {}, el('a', { href: '#h-patterns', text: 'See the attention patterns' }), ' of this block.')];
  }
  const i = data.parts.indexOf(part);
  found.push(figure(number(data.norms.at(i, state.block, state.pos)), 'length (Euclidean norm over all other axes)'));
  const direct = data.direct.parts.indexOf(part.part);
  if (direct >= 0) {
    const value = data.direct.values.at(direct, state.block, state.pos);
    found.push(figure(signed(value), `given to the ${data.target} here, before the softcap, along the stream`));
  } else if (part.part === 'attn.hook_z') {
    found.push(el('p', { class: 'sub', text: `Given to the ${data.target} at the last position, by head:` }), headList());
  } else {
    found.push(el('p', { class: 'sub', text: 'Not on the stream: it reaches logits only through what follows it in the block.' }));
  }
  return found.flat();
}

function headList() {
  const values = data.attribution.heads.values.part(state.block).values;
  const order = range(values.length).sort((a, b) => Math.abs(values[b]) - Math.abs(values[a])).slice(0, 4);
  return rows(order.map((head) => [`head ${head}`, signed(values[head]), 'n']));
}

function lensOf(part) {
  const { parts, positions, ids, logits, answer_ranks: ranks } = data.lens;
  const i = parts.indexOf(part.part);
  if (i < 0) return [el('p', { class: 'sub', text: 'Not as wide as the stream: the head cannot be asked about it.' })];
  const place = positions.indexOf(state.pos);
  if (place < 0) {
    return [el('p', { class: 'sub', text: `The lens of parts was kept from position ${positions[0]} on.` })];
  }
  const [id, logit, probability] = [ids, logits, data.lens.probabilities].map((grid) => grid.part(i, state.block, place).values);
  const list = topList(range(id.length).map((k) => ({
    label: named(id[k]), value: probability[k], told: [number(logit[k]), percent(probability[k])], asked: id[k] === data.answer.id,
  })), ['logit', 'probability']);
  const rank = `${data.answer.label} has rank ${whole(ranks.at(i, state.block, place))} here.`;
  return [el('p', { class: 'sub', text: 'Lens: final norm, head and softcap on this value' }), list, el('p', { class: 'sub', text: rank })];
}
