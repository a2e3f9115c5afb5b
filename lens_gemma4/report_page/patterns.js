// Attention patterns: those of the chosen block small, that of the chosen head large, the chosen query as coloured text.

const unpacked = new Map(); // block -> promise of [head query key], in steps

function patternsOf(block) {
  if (!unpacked.has(block)) unpacked.set(block, unpack(data.patterns.values[block]));
  return unpacked.get(block);
}
const seenBy = (block) => data.visible[data.blocks[block].kind]; // [pos pos]

function drawPatternsLede() {
  const { queries } = data.patterns;
  const n = data.tokens.length;
  const all = queries.length === n ? '' : ` Kept are the queries from position ${queries[0]} on.`;
  $('patterns-lede').textContent = `How much each query (row) looks at each key (column), in steps of ${1 / data.patterns.steps}. What a query cannot see is blank; `
    + `in sliding blocks that is also what lies before the window.${all} Left and right go through the heads, up and down through the blocks.`;
}

async function drawPatterns() {
  const block = state.block;
  const grid = await patternsOf(block);
  if (block !== state.block) return; // another was chosen meanwhile
  drawThumbnails(grid);
  drawPattern(grid);
  drawQuery(grid);
  document.documentElement.dataset.pattern = `${state.block} ${state.head} ${state.pos}`;
}

// -- all heads of the block ---------------------------------------------------------------------------

function drawThumbnails(grid) {
  const [heads] = grid.shape;
  const place = $('heads');
  place.setAttribute('aria-label', `Heads of block ${state.block}`);
  const buttons = range(heads).map((head) => {
    const on = head === state.head;
    return el('button', { type: 'button', role: 'radio', 'aria-checked': on, tabindex: on ? 0 : -1, 'aria-label': `head ${head}`, onclick: () => choose({ head }) },
      thumbnail(grid.part(head)), `${head}`);
  });
  place.onkeydown = (event) => {
    const up = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (up && !event.altKey && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      choose({ block: clamp(state.block + up, 0, data.model.n_layers - 1) });
    } else walk(event, buttons, state.head, (head) => choose({ head }), { ArrowLeft: -1, ArrowRight: 1 });
  };
  const focused = place.contains(document.activeElement);
  fill(place, buttons);
  if (focused) buttons[state.head].focus();
}

function thumbnail(pattern) {
  const [rows, columns] = pattern.shape;
  const canvas = el('canvas', { width: columns, height: rows, 'aria-hidden': 'true' });
  const pen = canvas.getContext('2d');
  const picture = pen.createImageData(columns, rows);
  const seen = seenBy(state.block);
  const first = data.patterns.queries[0];
  for (let r = 0; r < rows; r++) {
    for (let c = 0; c < columns; c++) {
      if (!seen.at(first + r, c)) continue;
      picture.data.set([...shareColour(pattern.at(r, c) / data.patterns.steps), 255], 4 * (r * columns + c));
    }
  }
  pen.putImageData(picture, 0, 0);
  return canvas;
}

// -- one head -----------------------------------------------------------------------------------------

function drawPattern(grid) {
  const { queries, steps } = data.patterns;
  const pattern = grid.part(state.head);
  const [rows, columns] = pattern.shape;
  const seen = seenBy(state.block);
  const place = $('pattern');
  const room = Math.min(600, place.clientWidth || 600) - 92;
  const side = clamp(room / columns, 0.5, 44);
  const names = side >= 13;
  fill($('pattern-caption'), `Block ${state.block}, head ${state.head} `, el('span', { class: 'light', text: kindWords(data.blocks[state.block]) }));
  const row = () => queries.indexOf(state.pos);
  const focused = place.contains(document.activeElement);
  const key = () => (picked && picked.pos === state.pos ? picked.key : strongest(pattern, row()));
  const map = heatMap(place, {
    rows, columns, cell: [side, side], margins: [92, names ? underNames() : UNDER], label: `Attention of block ${state.block}, head ${state.head}; rows are queries, columns keys`,
    colour: (r, c) => (seen.at(queries[r], c) ? shareColour(pattern.at(r, c) / steps) : null),
    said: (r, c) => `${positionName(queries[r])} → ${positionName(c)}: ${seen.at(queries[r], c) ? percent(pattern.at(r, c) / steps) : 'not seen'}`,
    chosen: () => [row(), key()],
    pick: (r, c) => { picked = { pos: queries[r], key: c }; choose({ pos: queries[r] }); map.draw(); },
    ticks: {
      rows: (r) => (names ? `${queries[r]} ${short(data.tokens[queries[r]].label)}` : String(queries[r])),
      columns: (c) => (names ? `${c} ${short(data.tokens[c].label)}` : String(c)),
      upright: names, width: names ? 13 : 26,
    },
    mark: (pen, { left, cell }) => windowEdge(pen, left, cell, rows, columns),
  });
  place.prepend(shareLegend(1, 'share of the query’s attention'));
  if (focused) map.canvas.focus();
}
let picked = null; // the cell that was chosen by hand; else the key that the query looks at most
function strongest(pattern, row) {
  if (row < 0) return 0;
  const shares = pattern.part(row).values;
  return shares.indexOf(Math.max(...shares));
}
const underNames = () => 22 + 6.6 * Math.max(...data.tokens.map((token, i) => `${i} ${short(token.label)}`.length));
const short = (label) => ([...label].length > 10 ? `${[...label].slice(0, 9).join('')}…` : label);

// A line around what each query sees.
function windowEdge(pen, left, cell, rows, columns) {
  const seen = seenBy(state.block);
  const first = data.patterns.queries[0];
  pen.strokeStyle = scheme().rim;
  pen.lineWidth = 1;
  pen.beginPath();
  for (let r = 0; r < rows; r++) {
    for (let c = 0; c < columns; c++) {
      const here = seen.at(first + r, c);
      const [x, y] = [left + c * cell[0], r * cell[1]];
      if (c + 1 < columns && here !== seen.at(first + r, c + 1)) { pen.moveTo(x + cell[0], y); pen.lineTo(x + cell[0], y + cell[1]); }
      if (r + 1 < rows && here !== seen.at(first + r + 1, c)) { pen.moveTo(x, y + cell[1]); pen.lineTo(x + cell[0], y + cell[1]); }
    }
  }
  pen.stroke();
}

// -- one query ----------------------------------------------------------------------------------------

// Shares of the chosen query's attention, of one head or the mean of all; null where they were not kept.
function attentionRow(grid, head) {
  const row = data.patterns.queries.indexOf(state.pos);
  if (row < 0) return null;
  const { steps } = data.patterns;
  const heads = head === null ? range(grid.shape[0]) : [head];
  const sums = new Float64Array(grid.shape[2]);
  for (const one of heads) grid.part(one, row).values.forEach((value, key) => { sums[key] += value / steps / heads.length; });
  return sums;
}

function drawQuery(grid) {
  const shares = attentionRow(grid, state.head);
  fill($('query-caption'), `Query ${positionName(state.pos)} `, el('span', { class: 'light', text: 'looks at' }));
  if (!shares) {
    fill($('query-text'), el('p', { class: 'note', text: `This query’s pattern was not kept; those from position ${data.patterns.queries[0]} on were.` }));
    fill($('query-top'));
    return;
  }
  tokenText($('query-text'), { label: 'Prompt, coloured by the attention of the query', values: shares, colour: (value) => shareColour(value), told: percent,
    visible: seenBy(state.block).part(state.pos).values });
  const order = range(shares.length).sort((a, b) => shares[b] - shares[a]).slice(0, 5).filter((key) => shares[key] > 0);
  fill($('query-top'), topList(order.map((key) => ({ label: positionName(key), value: shares[key], told: [percent(shares[key])] })), ['share']));
}
