// Tokens as text that can be chosen from; patches of a picture that follow each other stand as one.

const LONG = 120; // groups of a prompt that scrolls

function word(label) {
  const shown = el('bdi', {});
  // Signs for what is blank stay behind the letters.
  for (const piece of label.split(/([␣↵⇥]+)/)) {
    if (!piece) continue;
    shown.append(/^[␣↵⇥]/.test(piece) ? el('span', { class: 'blank', text: piece }) : piece);
  }
  return shown;
}
const named = (id) => data.vocabulary[id] ?? `token ${id}`;
const positionName = (pos) => `${pos} ${data.tokens[pos].label}`;

// [{label, places}]: each token, or all patches of one picture.
function groups() {
  const found = [];
  data.tokens.forEach((token, i) => {
    const before = found[found.length - 1];
    const picture = token.media ? token.label.split(' ')[0] : null;
    if (picture && before && before.picture === picture) before.places.push(i);
    else found.push({ label: token.label, picture, places: [i] });
  });
  for (const group of found) {
    if (group.picture) group.label = `${group.picture}: ${group.places.length} patches`;
  }
  return found;
}

// A prompt as buttons. With `values` (one a position) each is coloured by the sum over its places, and says it.
function tokenText(place, { label, values = null, colour = null, told = null, visible = null, key = 'pos' }) {
  const all = groups();
  const at = () => all.findIndex((group) => group.places.includes(state[key]));
  const buttons = all.map((group, i) => {
    const button = el('button', { type: 'button', role: 'radio', class: group.picture ? 'tok media' : 'tok',
      onclick: () => choose({ [key]: group.places[0] }) }, word(group.label));
    button.setAttribute('aria-checked', i === at());
    button.tabIndex = i === at() ? 0 : -1;
    if (values) {
      const value = group.places.reduce((sum, pos) => sum + values[pos], 0);
      const shade = colour(value);
      const known = !visible || group.places.some((pos) => visible[pos]);
      button.style.background = known ? css(shade) : 'none';
      if (known) button.style.color = inkOn(shade);
      button.append(el('small', { text: known ? told(value) : '·' }));
      button.setAttribute('aria-label', `${group.label}: ${known ? told(value) : 'not seen'}`);
    }
    return button;
  });
  const list = el('div', { class: all.length > LONG ? 'tokens long' : 'tokens', role: 'radiogroup', 'aria-label': label }, buttons);
  list.addEventListener('keydown', (event) =>
    walk(event, buttons, Math.max(at(), 0), (i) => choose({ [key]: all[i].places[0] })));
  const focused = place.contains(document.activeElement);
  fill(place, list);
  const chosen = buttons[Math.max(at(), 0)];
  if (all.length > LONG) list.scrollTop = chosen.offsetTop - list.offsetTop - list.clientHeight / 2; // the part around it
  if (focused) chosen.focus({ preventScroll: true });
}

// Tokens with a bar each: [{label, value, told: [text, text], asked}].
function topList(rows, heads, most = 1) {
  const cells = rows.flatMap((row) => {
    const mark = el('i', {});
    mark.style.width = `${clamp(100 * row.value / (most || 1), 0, 100)}%`;
    const name = el('span', { class: row.asked ? 'word is-asked' : 'word', title: row.label }, word(row.label));
    const numbers = row.told.map((text) => el('span', { class: row.asked ? 'n is-asked' : 'n', text }));
    return [name, el('span', { class: 'track' }, mark), ...numbers, ...(numbers.length < 2 ? [el('span', {})] : [])];
  });
  const first = heads.length < 2 ? [...heads, ''] : heads;
  return el('div', { class: 'top' }, el('span', {}), el('span', {}),
    first.map((text) => el('span', { class: 'n head', text })), cells);
}
