// Pictures as the model got them, with maps over their patches.

const PICTURE = 240;

function drawImages() {
  if (!data.images.length) return;
  $('images').hidden = false;
  $('to-images').hidden = false;
  $('images-lede').textContent = 'The picture as the model got it; each patch is a token. Attention is that of the chosen block from the chosen position; attribution is what '
    + `heads read from each patch into the ${data.target} at the last position; ablation is its change without the patch.`;
  switcher($('images-switch'), { one: 'Chosen head', all: 'All heads' }, 'images');
  const shown = data.images.map((image) => {
    const picture = new Image();
    picture.src = image.picture;
    return { image, picture, box: el('div', { class: 'image' }) };
  });
  fill($('image-list'), shown.map(({ box }) => box));
  Promise.all(shown.map(({ picture }) => picture.decode())).then(() =>
    follow(['block', 'head', 'pos', 'images'], () => shown.forEach(drawImage)));
}

async function drawImage({ image, picture, box }) {
  const [block, head, all] = [state.block, state.head, state.images === 'all'];
  const shares = attentionRow(await patternsOf(block), all ? null : head);
  if (block !== state.block || head !== state.head) return;
  const read = all ? sourceSums() : sourceSums(block, head);
  const taken = (values) => image.positions.map((pos) => values[pos]);
  const who = all ? `block ${block}, mean of heads` : `block ${block}, head ${head}`;
  const layers = [];
  if (shares) layers.push(shareLayer(`Attention: ${who}, from ${positionName(state.pos)}`, taken(shares)));
  layers.push(signedLayer(`Attribution: ${all ? 'all heads of all blocks' : who}`, taken(read), `${data.target}, before the softcap`));
  if (image.ablation) layers.push({ ...signedLayer('Ablation: without each patch', image.ablation, `change of the ${data.target}`), alone: true });
  const seen = el('img', { class: 'seen', src: image.picture, alt: `${image.name} as the model got it` });
  fill(box, el('figure', {}, el('figcaption', { text: 'As the model got it' }), el('div', { class: 'legend' },
    el('span', { class: 'unit', text: `${image.columns} × ${image.rows} patches${image.size ? ` of a picture of ${image.size.join(' × ')} pixels` : ''}` })), seen), layers.map((layer) => imageFigure(image, picture, layer)));
}

function shareLayer(caption, values) {
  const reach = reachOf(values);
  return { caption, values, colour: (value) => shareColour(value, reach), reach, told: percent, legend: () => shareLegend(reach, 'share of attention') };
}
function signedLayer(caption, values, unit) {
  const reach = reachOf(values);
  return { caption, values, colour: (value) => signedColour(value, reach), reach, told: signed, legend: () => signedLegend(reach, unit) };
}

function imageFigure(image, picture, layer) {
  const total = layer.values.reduce((a, b) => a + b, 0);
  const place = el('div', {});
  const side = PICTURE / Math.max(image.columns, image.rows);
  const at = new Map(image.grid.map(([x, y], i) => [`${y} ${x}`, i]));
  const index = (r, c) => at.get(`${r} ${c}`);
  const most = layer.values.reduce((best, value, i) => (Math.abs(value) > Math.abs(layer.values[best]) ? i : best), 0);
  let chosen = image.grid[most].slice().reverse();
  const map = heatMap(place, {
    rows: image.rows, columns: image.columns, cell: [side, side], margins: [3, 4], label: `${layer.caption}, over ${image.name}`,
    colour: () => null, chosen: () => chosen,
    said: (r, c) => (index(r, c) === undefined ? 'no patch' : `patch (${c}, ${r}): ${layer.told(layer.values[index(r, c)])}`),
    pick: (r, c) => { chosen = [r, c]; map.draw(); },
    ticks: { rows: () => '', columns: () => '' },
    mark: (pen) => overPicture(pen, image, picture, layer, side),
  });
  return el('figure', {}, el('figcaption', { text: layer.caption }), layer.legend(), place,
    layer.alone ? null : el('p', { class: 'note', text: `all patches together: ${layer.told(total)}` }));
}

// The picture in pale grey, and the more of a colour the further a value is from zero.
function overPicture(pen, image, picture, { values, colour, reach }, side) {
  pen.save();
  pen.translate(3, 0);
  pen.filter = 'grayscale(1)';
  pen.globalAlpha = 0.55;
  pen.drawImage(picture, 0, 0, image.columns * side, image.rows * side);
  pen.filter = 'none';
  image.grid.forEach(([x, y], i) => {
    pen.globalAlpha = reach ? 0.85 * Math.sqrt(Math.abs(values[i]) / reach) : 0;
    pen.fillStyle = css(colour(values[i]));
    pen.fillRect(x * side, y * side, side - 0.5, side - 0.5);
  });
  pen.restore();
  pen.strokeStyle = scheme().rim;
  pen.strokeRect(3, 0, image.columns * side, image.rows * side);
}
