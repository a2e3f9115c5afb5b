// The logit lens: a table of blocks and positions, and the answer's rank as it goes.

const MOST_CELLS = 16000;
const PRINTED = 12; // columns that paper has room for
const lensState = { place: 0, cells: new Map() };

function lensPositions() {
  const n = data.tokens.length;
  const most = Math.max(8, Math.floor(MOST_CELLS / data.logit_lens.places.length));
  return range(n).slice(Math.max(0, n - most));
}

function drawLensTable() {
  const { places, ids, probabilities } = data.logit_lens;
  const positions = lensPositions();
  lensState.place = places.length - 1;
  const note = $('lens-note');
  note.hidden = positions[0] === 0;
  note.textContent = `The table begins at position ${positions[0]}; earlier ones can be chosen above.`;
  const early = (pos) => (pos < data.tokens.length - PRINTED ? 'early' : '');
  $('lens-print').hidden = data.tokens.length <= PRINTED;
  $('lens-print').textContent = `Printed are the last ${PRINTED} positions.`;
  const head = el('tr', {}, el('th', { scope: 'col', text: 'after' }), positions.map((pos) =>
    el('th', { scope: 'col', class: early(pos), 'data-pos': pos, title: positionName(pos) }, word(data.tokens[pos].media ? data.tokens[pos].label.replace(/^\S+ /, '') : data.tokens[pos].label))));
  const body = places.map((name, i) => {
    const full = i > 0 && data.blocks[i - 1].kind === 'full';
    const cells = positions.map((pos) => {
      const cell = el('td', { tabindex: -1, class: early(pos), 'data-place': i, 'data-pos': pos }, word(named(ids.at(i, pos, 0))));
      lensState.cells.set(`${i} ${pos}`, cell);
      return cell;
    });
    return el('tr', {}, el('th', { scope: 'row', class: full ? 'full' : '', 'data-place': i, text: name }), cells);
  });
  const table = el('table', { class: places.length > 24 ? 'lens dense' : 'lens', role: 'grid', 'aria-label': 'Likeliest token after each block at each position' },
    el('thead', {}, head), el('tbody', {}, body));
  table.addEventListener('click', (event) => pickCell(event.target.closest('td')));
  table.addEventListener('pointermove', (event) => {
    const cell = event.target.closest('td');
    tip(cell ? cellWords(Number(cell.dataset.place), Number(cell.dataset.pos)) : '', event);
  });
  table.addEventListener('pointerleave', () => tip(''));
  table.addEventListener('keydown', lensKeys);
  fill($('lens-box'), table);
  // Colours follow the scheme, so they are set again when it changes.
  follow([], () => {
    fill($('lens-legend'), shareLegend(1, 'probability of the likeliest token'));
    for (const [key, cell] of lensState.cells) {
      const [i, pos] = key.split(' ').map(Number);
      const shade = shareColour(probabilities.at(i, pos, 0));
      cell.style.background = css(shade);
      cell.style.color = inkOn(shade);
    }
  });
  follow(['pos', 'block'], () => { lensState.place = state.block + 1; markLens(); });
  $('lens-box').scrollLeft = $('lens-box').scrollWidth;
}

function pickCell(cell) {
  if (!cell) return;
  const [place, pos] = [Number(cell.dataset.place), Number(cell.dataset.pos)];
  choose({ pos, ...(place > 0 ? { block: place - 1 } : {}) });
  lensState.place = place;
  markLens();
}

function lensKeys(event) {
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (!step || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  const next = lensState.cells.get(`${lensState.place + step[0]} ${state.pos + step[1]}`);
  if (!next) return;
  pickCell(next);
  next.focus();
  next.scrollIntoView({ block: 'nearest', inline: 'nearest' });
}

function markLens() {
  const { places } = data.logit_lens;
  const chosen = lensState.cells.get(`${lensState.place} ${state.pos}`);
  for (const [key, cell] of lensState.cells) {
    cell.classList.toggle('here', key.endsWith(` ${state.pos}`));
    const on = cell === chosen;
    cell.classList.toggle('on', on);
    cell.tabIndex = on ? 0 : -1;
    if (on) cell.setAttribute('aria-selected', 'true'); else cell.removeAttribute('aria-selected');
  }
  for (const head of $('lens-box').querySelectorAll('th')) {
    head.classList.toggle('here', head.dataset.pos === String(state.pos));
    head.classList.toggle('on', head.dataset.place === String(lensState.place));
  }
  const where = lensState.place ? `After block ${places[lensState.place]}` : 'Before block 0';
  fill($('lens-told'), el('p', { text: `${where}, at position ${positionName(state.pos)}:` }), topList(lensRows(lensState.place, state.pos), ['probability', 'logit']));
}

function lensRows(place, pos) {
  const { ids, logits, probabilities } = data.logit_lens;
  return range(ids.shape[2]).map((k) => ({
    label: named(ids.at(place, pos, k)), value: probabilities.at(place, pos, k), asked: ids.at(place, pos, k) === data.answer.id,
    told: [percent(probabilities.at(place, pos, k)), number(logits.at(place, pos, k))],
  }));
}

const cellWords = (place, pos) => [`${place ? `after block ${data.logit_lens.places[place]}` : 'before block 0'}, position ${positionName(pos)}`,
  ...lensRows(place, pos).map((row) => `${row.label}  ${row.told[0]}`)].join('\n');

// -- the answer's rank --------------------------------------------------------------------------------

function drawRank() {
  const { places, ranks, asked, asked_probabilities: probabilities } = data.logit_lens;
  const box = $('rank');
  const keys = asked.map((id, i) => el('span', { class: 'key' }, el('i', { class: `line-${i}` }), word(named(id))));
  fill($('rank-caption'), 'Rank after each block ', el('span', { class: 'light', text: `at position ${positionName(state.pos)}; 0 is the first choice` }), keys);
  const wide = blockColumns();
  const [top, tall] = [12, 130];
  const height = top + tall + 24;
  const x = (place) => LEFT + (place + 0.5) * wide * (data.model.n_layers / places.length);
  const most = Math.log10(1 + data.model.d_vocab);
  const y = (rank) => top + (tall * Math.log10(1 + rank)) / most;
  const marks = [0, 1, 10, 100, 1000, 10000, 100000].filter((rank) => rank < data.model.d_vocab);
  const drawing = svg('svg', { width: LEFT + data.model.n_layers * wide, height, role: 'img', 'aria-label': 'Rank of the asked tokens after each block' });
  for (const rank of marks) {
    drawing.append(svg('path', { class: 'axis', d: `M${LEFT} ${Math.round(y(rank)) + 0.5}H${LEFT + data.model.n_layers * wide}` }),
      svg('text', { class: 'tick', x: LEFT - 8, y: y(rank) + 4, 'text-anchor': 'end', text: whole(rank) }));
  }
  const step = everyOf(places.length, x(1) - x(0), 34);
  places.forEach((name, i) => {
    if (i === 0 || ((i - 1) % step === 0 && (i > 1 || step === 1))) drawing.append(svg('text', { class: 'tick', x: x(i), y: height - 6, 'text-anchor': 'middle', text: name }));
  });
  asked.forEach((id, k) => {
    const points = places.map((_, i) => [x(i), y(ranks.at(i, state.pos, k))]);
    drawing.append(svg('polyline', { class: `line-${k}`, points: points.map((p) => p.join(',')).join(' ') }));
    points.forEach(([px, py], i) => drawing.append(svg('circle', { class: `dot-${k}`, cx: px, cy: py, r: wide < 14 ? 2.2 : 3.2,
      ...tipped(`${named(id)} ${i ? `after block ${places[i]}` : 'before block 0'}: rank ${whole(ranks.at(i, state.pos, k))}, ${percent(probabilities.at(i, state.pos, k))}`) })));
  });
  fill(box, drawing);
}
