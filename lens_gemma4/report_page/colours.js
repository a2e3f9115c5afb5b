// Scales that colour-blind eyes can read: blue above zero and orange below, neutral at 0; shades of blue from 0 to 1.
// On dark paper what is far from zero is bright, on light paper it is dark.

const SCALES = {
  light: {
    signed: ['#7f2704', '#d4722c', '#f2f3f5', '#4d92cd', '#08387a'],
    share: ['#f2f3f5', '#b9d4ec', '#5b9bd3', '#1d5fa5', '#082f66'],
    hidden: '#ffffff', rim: '#c9ced5', ink: '#1b1f24', soft: '#59616c', accent: '#0a58a6',
  },
  dark: {
    signed: ['#ffc596', '#c0672b', '#262b32', '#3a7cc0', '#b3d8ff'],
    share: ['#262b32', '#234c78', '#3b7fc4', '#83b8f0', '#dcecff'],
    hidden: '#14171b', rim: '#454d58', ink: '#e7e9ec', soft: '#a3abb6', accent: '#7fb8ff',
  },
};
const isDark = matchMedia('(prefers-color-scheme: dark)');
const isPrint = matchMedia('print');
const scheme = () => SCALES[isDark.matches && !isPrint.matches ? 'dark' : 'light'];
isDark.addEventListener('change', redraw);
isPrint.addEventListener('change', redraw);

const parsed = new Map();
function rgb(colour) {
  if (!parsed.has(colour)) parsed.set(colour, [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16)));
  return parsed.get(colour);
}

// A colour between the stops of a scale, `t` from 0 to 1.
function between(stops, t) {
  const place = clamp(t, 0, 1) * (stops.length - 1);
  const i = Math.min(Math.floor(place), stops.length - 2);
  const [from, to] = [rgb(stops[i]), rgb(stops[i + 1])];
  return from.map((value, channel) => Math.round(value + (to[channel] - value) * (place - i)));
}
const signedColour = (value, reach) => between(scheme().signed, reach ? 0.5 + value / reach / 2 : 0.5);
const shareColour = (value, reach = 1) => between(scheme().share, reach ? value / reach : 0);
const css = ([r, g, b]) => `rgb(${r} ${g} ${b})`;

// Black or white, whichever can be read on a colour: both have a contrast of 4.6 where they change places.
function inkOn(colour) {
  const [r, g, b] = colour.map((v) => (v > 10 ? ((v / 255 + 0.055) / 1.055) ** 2.4 : v / 255 / 12.92));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? '#000000' : '#ffffff';
}

function reachOf(values) {
  let most = 0;
  for (const value of values) if (Math.abs(value) > most) most = Math.abs(value);
  return most;
}

// A canvas as sharp as the screen (or paper) allows.
function canvasOf(width, height) {
  const canvas = el('canvas', {});
  const dense = Math.max(2, window.devicePixelRatio || 1);
  canvas.width = Math.round(width * dense);
  canvas.height = Math.round(height * dense);
  canvas.style.width = `${width}px`;
  const pen = canvas.getContext('2d');
  pen.scale(dense, dense);
  return [canvas, pen];
}

// Left end, (zero), right end of a scale, and its unit.
function legend(colourAt, ends, unit) {
  const [canvas, pen] = canvasOf(140, 10);
  for (let x = 0; x < 140; x++) {
    pen.fillStyle = css(colourAt(x / 139));
    pen.fillRect(x, 0, 1.5, 10);
  }
  canvas.setAttribute('aria-hidden', 'true');
  return el('div', { class: 'legend' }, el('span', { text: ends[0] }), canvas, el('span', { text: ends[1] }),
    el('span', { class: 'unit', text: unit }));
}
const signedLegend = (reach, unit) =>
  legend((t) => signedColour(2 * t - 1, 1), reach ? [number(-reach), `+${number(reach)}`] : ['0', '0'], `${unit} · 0 is neutral`);
const shareLegend = (reach, unit) => legend((t) => shareColour(t), ['0', reach === 1 ? '1' : number(reach)], unit);
