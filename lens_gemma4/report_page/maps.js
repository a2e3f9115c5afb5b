// Heat maps on a canvas: a cell is chosen by pointer or arrows, and said in words below.

const LEFT = 52;
const UNDER = 22;
const TOP = 3; // room for the rim of a chosen cell

// Columns of a map whose axis is the blocks, as wide as there is room; measured once, since it makes the page be laid out.
let roomOfMain = 0;
function blockColumns() {
  const n = data.model.n_layers;
  if (!roomOfMain) roomOfMain = $('bars').clientWidth || 1000;
  const room = Math.max(240, roomOfMain - LEFT - 2);
  return Math.min(96, Math.floor((10 * room) / n) / 10);
}

// Numbers on an axis that do not run into each other.
const everyOf = (n, size, width = 22) => [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512].find((step) =>
  step * size >= width || step >= n);

/* A map of `rows` x `columns`:
   cell [width, height]; colour(r, c) as [r g b], or null for a cell that is not there; said(r, c) in words;
   chosen() [r, c]; pick(r, c); ticks: {rows(r), columns(c)} labels or null; margins [left, under]; mark(pen, sizes) draws over it. */
function heatMap(place, options) {
  const { rows, columns, cell, margins = [LEFT, UNDER], label } = options;
  const [left, under] = margins;
  const [width, height] = [left + columns * cell[0] + 3, TOP + rows * cell[1] + under];
  const [canvas, pen] = canvasOf(width, height);
  canvas.tabIndex = 0;
  for (const [name, value] of Object.entries({ role: 'application', 'aria-roledescription': 'heat map', 'aria-label': label })) {
    canvas.setAttribute(name, value);
  }
  const said = el('p', { class: 'said', 'aria-live': 'polite' });
  const gap = Math.min(...cell) >= 7 ? 1 : 0;

  function draw() {
    pen.clearRect(0, 0, width, height);
    pen.save();
    pen.translate(0, TOP);
    for (let r = 0; r < rows; r++) {
      for (let c = 0; c < columns; c++) {
        const colour = options.colour(r, c);
        if (!colour) continue;
        pen.fillStyle = css(colour);
        pen.fillRect(left + c * cell[0], r * cell[1], cell[0] - gap, cell[1] - gap);
        if (options.written) write(pen, options.written(r, c), left + (c + 0.5) * cell[0], (r + 0.5) * cell[1], inkOn(colour));
      }
    }
    drawTicks(pen, options, left, cell);
    if (options.mark) options.mark(pen, { left, cell });
    const [row, column] = options.chosen();
    if (row >= 0 && column >= 0) rim(pen, left + column * cell[0], row * cell[1], cell, gap);
    pen.restore();
    said.textContent = row >= 0 && column >= 0 ? options.said(row, column) : '';
  }

  function under_(event) {
    const box = canvas.getBoundingClientRect();
    const zoom = width / box.width;
    const c = Math.floor(((event.clientX - box.left) * zoom - left) / cell[0]);
    const r = Math.floor(((event.clientY - box.top) * zoom - TOP) / cell[1]);
    return r >= 0 && r < rows && c >= 0 && c < columns ? [r, c] : null;
  }
  canvas.addEventListener('pointermove', (event) => {
    const at = under_(event);
    tip(at ? options.said(...at) : '', event);
    canvas.style.cursor = at ? 'pointer' : '';
  });
  canvas.addEventListener('pointerleave', () => tip(''));
  canvas.addEventListener('click', (event) => {
    const at = under_(event);
    if (at) options.pick(...at);
  });
  canvas.addEventListener('keydown', (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!step || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const [r, c] = options.chosen();
    options.pick(clamp(r + step[0], 0, rows - 1), clamp(c + step[1], 0, columns - 1));
  });
  fill(place, el('div', { class: 'map' }, canvas, said));
  draw();
  return { draw, canvas };
}

function write(pen, text, x, y, ink) {
  pen.fillStyle = ink;
  pen.font = `11.5px ${getComputedStyle(document.body).fontFamily}`;
  pen.textAlign = 'center';
  pen.textBaseline = 'middle';
  pen.fillText(text, x, y);
}

// The chosen cell, seen on any colour.
function rim(pen, x, y, cell, gap) {
  const { accent, hidden } = scheme();
  for (const [colour, wide, out] of [[hidden, 4.5, 1], [accent, 2.2, 1]]) {
    pen.strokeStyle = colour;
    pen.lineWidth = wide;
    pen.strokeRect(x - out + 0.5, y - out + 0.5, cell[0] - gap + 2 * out - 1, cell[1] - gap + 2 * out - 1);
  }
}

function drawTicks(pen, { rows, columns, ticks }, left, cell) {
  const { soft, ink } = scheme();
  const font = getComputedStyle(document.body).fontFamily;
  pen.textBaseline = 'middle';
  pen.textAlign = 'right';
  const down = everyOf(rows, cell[1], 13);
  for (let r = 0; r < rows; r += down) {
    const text = ticks.rows(r);
    pen.font = `11.5px ${font}`;
    pen.fillStyle = soft;
    pen.fillText(text, left - 8, (r + 0.5) * cell[1], left - 10);
  }
  const across = everyOf(columns, cell[0], ticks.width || 22);
  for (let c = 0; c < columns; c += across) {
    const [text, strong] = [].concat(ticks.columns(c));
    pen.font = `${strong ? '700 ' : ''}11.5px ${font}`;
    pen.fillStyle = strong ? ink : soft;
    if (ticks.upright) {
      pen.save();
      pen.translate(left + (c + 0.5) * cell[0], rows * cell[1] + 8);
      pen.rotate(-Math.PI / 2);
      pen.fillText(text, 0, 0, 86);
      pen.restore();
    } else {
      pen.textAlign = 'center';
      pen.fillText(text, left + (c + 0.5) * cell[0], rows * cell[1] + 12);
    }
  }
}

// Blocks from left to right, heads from top to bottom.
function headMap(place, values, said, label) {
  const { n_layers: columns, n_heads: rows } = data.model;
  const reach = reachOf(values.values);
  const wide = blockColumns();
  return heatMap(place, {
    rows, columns, label,
    cell: [wide, clamp(Math.round(wide), 14, 26)],
    colour: (r, c) => signedColour(values.at(c, r), reach),
    written: wide >= 56 ? (r, c) => signed(values.at(c, r)) : null,
    said: (r, c) => `block ${c}, head ${r}: ${said(values.at(c, r))}`,
    chosen: () => [state.head, state.block],
    pick: (r, c) => choose({ head: r, block: c }),
    ticks: {
      rows: (r) => `${r === 0 ? 'head ' : ''}${r}`,
      columns: (c) => [String(c), data.blocks[c].kind === 'full'],
    },
  });
}
