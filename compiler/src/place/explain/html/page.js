'use strict';
// The timeline on a canvas: only the part in view is drawn, at the resolution of the screen.
const data = JSON.parse(document.getElementById('data').textContent);
const byId = id => document.getElementById(id);
const [chart, space, canvas, tip, detail] = ['chart', 'space', 'canvas', 'tip', 'detail'].map(byId);
const pen = canvas.getContext('2d');

const AXIS = 22, LABEL = 17, BAR = 20, STRIP = 5, MEMORY = 34, GAP = 8;
const PALETTE = ['#6fa8dc', '#f0a860', '#7cc48a', '#e28a8a', '#b39ddb', '#d8bf58', '#70c1ba', '#e091c0', '#a5bd6e',
  '#b4bac0', '#8795a3'];
const OTHER = PALETTE.length - 2, TRANSFER = PALETTE.length - 1;
const END = Math.max(1, data.end), SHORTEST = Math.max(20, END / 1e6);

const view = {from: 0, to: END};
let width = 0, selected = -1, hovered = null, only = -1, theme = {};

// Rows from top to bottom, and the bars of each in order of time.
let below = AXIS + 4;
for (const row of data.rows) {
  row.top = below;
  row.bar = below + LABEL;
  row.memoryTop = row.bar + BAR + STRIP + 2;
  below = row.memory ? row.memoryTop + MEMORY + GAP : row.bar + BAR + STRIP + GAP;
  row.bars = [];
}
const HEIGHT = below;
data.bars.forEach((bar, i) => {
  bar.index = i;
  data.rows[bar.row].bars.push(bar);
});
for (const row of data.rows) row.bars.sort((a, b) => a.start - b.start || a.end - b.end);

const colourOf = index => {
  if (index === data.transfers) return PALETTE[TRANSFER];
  return index === data.others ? PALETTE[OTHER] : PALETTE[index % OTHER];
};

const UNITS = [[1e9, 's'], [1e6, 'ms'], [1e3, 'us'], [1, 'ns']];
const timeText = ns => {
  const [size, unit] = UNITS.find(u => ns >= u[0]) || UNITS[3];
  return (unit === 'ns' ? Math.round(ns) : (ns / size).toFixed(2)) + ' ' + unit;
};
const bytesText = n => {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  const power = n < 1 ? 0 : Math.min(4, Math.floor(Math.log2(n) / 10));
  return (power ? (n / 1024 ** power).toFixed(1) : n) + ' ' + units[power];
};

const xOf = ns => (ns - view.from) / (view.to - view.from) * width;
const nsOf = x => view.from + x / width * (view.to - view.from);

/// Index of the first element of sorted `list` for which `is` holds.
const firstWhere = (list, is) => {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (is(list[middle])) high = middle; else low = middle + 1;
  }
  return low;
};

/// The text, its last part, or its beginning, as `room` allows; empty where nothing fits.
const fitted = (text, room) => {
  if (room < 14) return '';
  const fits = t => pen.measureText(t).width <= room;
  if (fits(text)) return text;
  const last = text.slice(text.lastIndexOf('/') + 1);
  if (last && fits(last)) return last;
  const n = Math.floor(last.length * (room - 8) / pen.measureText(last).width);
  return n >= 3 ? last.slice(0, n) + '…' : '';
};

const readTheme = () => {
  const style = getComputedStyle(document.documentElement);
  for (const name of ['paper', 'ink', 'faint', 'line', 'panel', 'path', 'memory', 'limit', 'period', 'accent'])
    theme[name] = style.getPropertyValue('--' + name).trim();
};

/// Distance of ticks: 1, 2 or 5 times a power of ten, about 90 pixels.
const tickStep = () => {
  const wanted = (view.to - view.from) * 90 / Math.max(width, 1);
  const power = 10 ** Math.floor(Math.log10(Math.max(wanted, 1)));
  return [1, 2, 5, 10].map(m => m * power).find(step => step >= wanted) || 10 * power;
};

const drawGrid = height => {
  const step = tickStep();
  pen.strokeStyle = theme.line;
  for (let at = Math.ceil(view.from / step) * step; at <= view.to; at += step) {
    const x = Math.round(xOf(at)) + .5;
    pen.beginPath();
    pen.moveTo(x, AXIS);
    pen.lineTo(x, height);
    pen.stroke();
  }
};

/// The time axis stays at the top of the view; its unit is that of its largest label.
const drawAxis = () => {
  const step = tickStep();
  const [size, unit] = UNITS.find(u => view.to >= u[0]) || UNITS[3];
  const digits = Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9));
  pen.fillStyle = theme.panel;
  pen.fillRect(0, 0, width, AXIS);
  pen.fillStyle = pen.strokeStyle = theme.ink;
  for (let at = Math.ceil(view.from / step) * step; at <= view.to; at += step) {
    const x = xOf(at), text = (at / size).toFixed(digits) + ' ' + unit;
    pen.fillRect(Math.round(x), AXIS - 5, 1, 5);
    const room = pen.measureText(text).width;
    pen.fillText(text, Math.min(Math.max(x - room / 2, 2), width - room - 2), 10);
  }
  pen.fillStyle = theme.line;
  pen.fillRect(0, AXIS, width, 1);
};

const drawPeriod = height => {
  if (!data.period) return;
  const [from, to] = data.period.map(xOf);
  pen.fillStyle = theme.period;
  pen.fillRect(from, AXIS, to - from, height);
  pen.fillStyle = theme.faint;
  const text = fitted('one period, all stages busy', to - from - 6) || fitted('period', to - from - 6);
  pen.fillText(text, from + 3, height - 7);
};

const drawBar = (bar, y, x0, x1) => {
  const from = Math.max(x0, -2), to = Math.min(Math.max(x1, x0 + 1.5), width + 2);
  pen.globalAlpha = only < 0 || bar.colour === only ? 1 : .15;
  pen.fillStyle = colourOf(bar.colour);
  pen.fillRect(from, y, to - from - (to - from > 4 ? 1 : 0), BAR);
  const text = fitted(data.names[bar.task], to - from - 8);
  if (text) {
    pen.fillStyle = '#14181c';
    pen.fillText(text, from + 4, y + BAR / 2 + .5);
  }
  pen.globalAlpha = 1;
  if (bar.task === selected || bar === hovered) {
    pen.strokeStyle = theme.ink;
    pen.lineWidth = 2;
    pen.strokeRect(from, y, Math.max(to - from - 1, 1), BAR);
    pen.lineWidth = 1;
  }
};

const drawBars = (row, y) => {
  const ends = row.bars, first = Math.max(0, firstWhere(ends, b => b.end >= view.from));
  let drawn = -1;
  for (let i = first; i < ends.length && ends[i].start <= view.to; i++) {
    const bar = ends[i], x0 = xOf(bar.start), x1 = xOf(bar.end);
    // Of bars within one pixel the first stands for all, unless another is meant.
    const isSpecial = bar.task === selected || bar === hovered || bar.colour === only;
    if (x1 - x0 < 1 && Math.floor(x1) === drawn && !isSpecial) continue;
    drawn = Math.floor(x1);
    drawBar(bar, y, x0, x1);
  }
};

/// The height of the band is the peak, or the limit where that is not far above it.
const drawMemory = (row, y) => {
  const {levels, peak, limit} = row.memory;
  const most = limit && limit <= 3 * peak ? Math.max(limit, peak) : peak;
  const yOf = bytes => y + MEMORY - MEMORY * bytes / most;
  pen.beginPath();
  pen.moveTo(0, y + MEMORY);
  const start = Math.max(0, firstWhere(levels, l => l[0] > view.from) - 1);
  for (let i = start; i < levels.length && levels[i][0] <= view.to; i++) {
    const until = i + 1 < levels.length ? levels[i + 1][0] : END;
    pen.lineTo(Math.max(0, xOf(levels[i][0])), yOf(levels[i][1]));
    pen.lineTo(Math.min(width, xOf(until)), yOf(levels[i][1]));
  }
  pen.lineTo(Math.min(width, xOf(END)), y + MEMORY);
  pen.fillStyle = theme.memory;
  pen.fill();
  pen.fillStyle = theme.line;
  pen.fillRect(0, y + MEMORY, width, 1);
  if (limit && limit <= 3 * peak) {
    pen.strokeStyle = theme.limit;
    pen.setLineDash([5, 4]);
    pen.strokeRect(-2, yOf(limit) + .5, width + 4, 0);
    pen.setLineDash([]);
  }
};

/// A line below the bars of the critical path, and on to the next of them.
const drawPath = scroll => {
  if (!byId('path').checked) return;
  const yOf = bar => data.rows[bar.row].bar + BAR + 3 - scroll;
  pen.strokeStyle = pen.fillStyle = theme.path;
  const isInView = bar => bar.end >= view.from && bar.start <= view.to;
  const steps = data.path.map(index => data.bars[index]);
  for (const bar of steps.filter(isInView)) {
    const x = xOf(bar.start);
    pen.fillRect(x, yOf(bar) - 1.5, Math.max(1, xOf(bar.end) - x), 3);
  }
  const crossings = steps.slice(1).map((bar, i) => [steps[i], bar])
    .filter(([a, b]) => a.row !== b.row && b.start >= view.from && a.end <= view.to);
  const alpha = crossings.length > 24 ? .22 : .6;
  for (const [a, b] of crossings) line(xOf(a.end), yOf(a), xOf(b.start), yOf(b), alpha);
};

const line = (x0, y0, x1, y1, alpha) => {
  pen.globalAlpha = alpha;
  pen.beginPath();
  pen.moveTo(x0, y0);
  pen.lineTo(x1, y1);
  pen.stroke();
  pen.globalAlpha = 1;
};

/// Transfers of the selected node, from its device to theirs.
const drawSelected = scroll => {
  const yOf = row => data.rows[row].bar + BAR / 2 - scroll;
  pen.strokeStyle = theme.accent;
  pen.lineWidth = 2;
  for (const bar of data.bars) {
    if (bar.task !== selected || bar.bytes === undefined) continue;
    const [from, to] = data.rows[bar.row].ends;
    line(xOf(bar.start), yOf(from), xOf(bar.end), yOf(to), .9);
  }
  pen.lineWidth = 1;
};

const drawRow = (row, scroll) => {
  const y = row.top - scroll;
  pen.fillStyle = theme.panel;
  pen.fillRect(0, y + LABEL, width, BAR);
  drawBars(row, y + LABEL);
  if (row.memory) drawMemory(row, row.memoryTop - scroll);
  pen.fillStyle = theme.ink;
  const name = fitted(row.name, width - 8);
  pen.fillText(name, 4, y + LABEL / 2);
  pen.fillStyle = theme.faint;
  const used = pen.measureText(name).width + 14;
  pen.fillText(fitted(row.note, width - used - 4), used, y + LABEL / 2);
};

const draw = () => {
  const height = chart.clientHeight, scroll = chart.scrollTop, scale = devicePixelRatio || 1;
  width = chart.clientWidth;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.width = width + 'px';
  canvas.style.height = height + 'px';
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.font = '11px system-ui, sans-serif';
  pen.textBaseline = 'middle';
  pen.fillStyle = theme.paper;
  pen.fillRect(0, 0, width, height);
  drawPeriod(Math.min(height, HEIGHT - scroll));
  drawGrid(height);
  const inView = row => row.top - scroll < height && row.top - scroll > -(LABEL + BAR + STRIP + MEMORY + GAP + 4);
  data.rows.filter(inView).forEach(row => drawRow(row, scroll));
  drawPath(scroll);
  if (selected >= 0) drawSelected(scroll);
  drawAxis();
};

let isWaiting = false;
const redraw = () => {
  if (isWaiting) return;
  isWaiting = true;
  requestAnimationFrame(() => { isWaiting = false; draw(); });
};

const show = (from, length) => {
  const span = Math.min(END, Math.max(SHORTEST, length));
  view.from = Math.min(Math.max(0, from), END - span);
  view.to = view.from + span;
  redraw();
};
const zoom = (factor, x) => {
  const at = nsOf(x), span = (view.to - view.from) / factor;
  show(at - x / width * Math.min(END, Math.max(SHORTEST, span)), span);
};
const all = () => show(0, END);
const move = share => show(view.from + share * (view.to - view.from), view.to - view.from);

/// The row, and the bar or memory level, at a position of the pointer.
const at = event => {
  const box = canvas.getBoundingClientRect();
  const x = event.clientX - box.left, y = event.clientY - box.top + chart.scrollTop;
  const row = data.rows.find(r => y >= r.bar && y < (r.memory ? r.memoryTop + MEMORY : r.bar + BAR + STRIP));
  if (!row) return {};
  if (y >= row.bar + BAR + STRIP) return {row, ns: nsOf(x)};
  const reach = 3 * (view.to - view.from) / width, ns = nsOf(x);
  const next = firstWhere(row.bars, b => b.start > ns), near = row.bars.slice(Math.max(0, next - 2), next + 1);
  const distance = b => Math.max(b.start - ns, ns - b.end, 0);
  const bar = near.filter(b => distance(b) <= reach).sort((a, b) => distance(a) - distance(b))[0];
  return {row, bar};
};

const barText = (bar, row) => {
  const what = bar.bytes === undefined ? '' : `transfer of ${bytesText(bar.bytes)}: `;
  const run = bar.run || data.period ? `run ${(bar.run || 0) + 1}, ` : '';
  const node = byId('n' + bar.task), op = bar.bytes === undefined && node ? node.querySelector('i').textContent : '';
  const reason = bar.bytes === undefined && node ? '\n' + node.querySelector('p').textContent : '';
  return `${what}${data.names[bar.task]} ${op}\n${run}${row.name}\n` +
    `${timeText(bar.start)} to ${timeText(bar.end)}, ${timeText(bar.end - bar.start)}${reason}`;
};
const memoryText = ({memory, name}, ns) => {
  const level = memory.levels[Math.max(0, firstWhere(memory.levels, l => l[0] > ns) - 1)];
  const limit = memory.limit ? `, limit ${bytesText(memory.limit)}` : '';
  return `${name}\n${bytesText(level[1])} held at ${timeText(ns)}\npeak ${bytesText(memory.peak)}${limit}`;
};

const point = event => {
  const {row, bar, ns} = at(event);
  if (hovered !== (bar || null)) { hovered = bar || null; redraw(); }
  const text = bar ? barText(bar, row) : row && ns !== undefined && ns <= END ? memoryText(row, ns) : '';
  tip.hidden = !text;
  tip.textContent = text;
  const left = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + 16, isBelow = below + tip.offsetHeight < innerHeight;
  tip.style.left = Math.max(8, left) + 'px';
  tip.style.top = (isBelow ? below : event.clientY - tip.offsetHeight - 10) + 'px';
};

/// Shows the explanation of the node that the address names, and its bar.
const select = () => {
  const node = /^#n\d+$/.test(location.hash) && document.querySelector(location.hash);
  selected = node ? Number(location.hash.slice(2)) : -1;
  detail.hidden = !node;
  if (node) {
    const title = document.createElement('div');
    title.className = 'name';
    title.append(...node.querySelector('summary').cloneNode(true).childNodes);
    const rest = [...node.children].slice(1).map(child => child.cloneNode(true));
    detail.lastElementChild.replaceChildren(title, ...rest);
    reveal(data.bars.find(bar => bar.task === selected && bar.bytes === undefined));
  }
  redraw();
};
const reveal = bar => {
  if (!bar) return;
  const span = view.to - view.from, row = data.rows[bar.row];
  if (bar.start < view.from || bar.end > view.to) show((bar.start + bar.end - span) / 2, span);
  const isVisible = row.top > chart.scrollTop + AXIS && row.bar + BAR < chart.scrollTop + chart.clientHeight;
  if (!isVisible) chart.scrollTop = row.top - AXIS - 8;
};
// A click keeps the place in the page; the address still names the node.
const choose = hash => {
  history.pushState(null, '', hash || location.pathname + location.search);
  select();
};

let drag = null;
chart.addEventListener('pointerdown', e => {
  if (e.button === 0) drag = {x: e.clientX, from: view.from, isMoved: false};
});
addEventListener('pointermove', e => {
  if (drag && (drag.isMoved || Math.abs(e.clientX - drag.x) > 4)) {
    drag.isMoved = true;
    chart.classList.add('moving');
    tip.hidden = true;
    show(drag.from - (e.clientX - drag.x) / width * (view.to - view.from), view.to - view.from);
  } else if (chart.contains(e.target)) point(e);
});
addEventListener('pointerup', e => {
  const isClick = drag && !drag.isMoved && chart.contains(e.target);
  drag = null;
  chart.classList.remove('moving');
  const {bar} = isClick ? at(e) : {};
  if (bar) choose('#n' + bar.task);
});
addEventListener('pointercancel', () => { drag = null; });
chart.addEventListener('pointerleave', () => { tip.hidden = true; hovered = null; redraw(); });
chart.addEventListener('dblclick', all);
chart.addEventListener('scroll', redraw);
chart.addEventListener('wheel', e => {
  const x = e.clientX - canvas.getBoundingClientRect().left;
  if (e.ctrlKey || e.metaKey) zoom(Math.exp(-e.deltaY / 300), x);
  else if (e.deltaX || e.shiftKey) move((e.deltaX || e.deltaY) / width);
  else return;
  e.preventDefault();
}, {passive: false});
chart.addEventListener('keydown', e => {
  const acts = {'+': () => zoom(1.6, width / 2), '=': () => zoom(1.6, width / 2), '-': () => zoom(1 / 1.6, width / 2),
    '0': all, ArrowLeft: () => move(-.2), ArrowRight: () => move(.2)};
  if (!acts[e.key] || e.ctrlKey || e.metaKey) return;
  acts[e.key]();
  e.preventDefault();
});
for (const button of document.querySelectorAll('[data-zoom]'))
  button.addEventListener('click', () => Number(button.dataset.zoom) ? zoom(Number(button.dataset.zoom), width / 2) : all());
for (const key of document.querySelectorAll('[data-colour]')) {
  const colour = Number(key.dataset.colour);
  key.style.setProperty('--swatch', colourOf(colour));
  key.addEventListener('click', () => {
    only = only === colour ? -1 : colour;
    for (const k of document.querySelectorAll('[data-colour]'))
      k.classList.toggle('off', only >= 0 && Number(k.dataset.colour) !== only);
    redraw();
  });
}
byId('path').addEventListener('change', redraw);
byId('close').addEventListener('click', () => choose(''));
byId('filter').addEventListener('input', e => {
  const part = e.target.value.toLowerCase();
  let n = 0;
  for (const node of byId('nodes').children) {
    node.hidden = !node.firstElementChild.textContent.toLowerCase().includes(part);
    n += node.hidden ? 0 : 1;
  }
  byId('shown').textContent = n + (n === 1 ? ' node' : ' nodes');
});
document.addEventListener('click', e => {
  const link = e.target.closest && e.target.closest('a[href^="#n"]');
  if (!link) return;
  e.preventDefault();
  choose(link.getAttribute('href'));
});
addEventListener('hashchange', select);
addEventListener('popstate', select);
addEventListener('resize', redraw);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { readTheme(); redraw(); });

space.style.height = HEIGHT + 'px';
chart.style.height = Math.min(HEIGHT + 2, innerHeight * .75) + 'px';
readTheme();
select();
draw();
// The browser has gone to the node in the list; its explanation stands beside the timeline.
if (selected >= 0) addEventListener('load', () => setTimeout(() => scrollTo(0, 0)));
