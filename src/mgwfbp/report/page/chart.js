// Charts: lines over numbers, columns and stacked bars over labels. Each stands above the table of its numbers.

const MARKS = [
  (x, y) => `M${x - 3.5} ${y}a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0z`,
  (x, y) => `M${x - 3.2} ${y - 3.2}h6.4v6.4h-6.4z`,
  (x, y) => `M${x} ${y - 4.2}l4 7h-8z`,
  (x, y) => `M${x} ${y - 4.4}l4.4 4.4l-4.4 4.4l-4.4 -4.4z`,
  (x, y) => `M${x} ${y + 4.2}l4 -7h-8z`,
  (x, y) => `M${x - 4} ${y - 1.4}h8v2.8h-8z`,
  (x, y) => `M${x - 1.4} ${y - 4}h2.8v8h-2.8z`,
  (x, y) => `M${x - 4} ${y - 4}l4 3l4 -3l-3 4l3 4l-4 -3l-4 3l3 -4z`,
];

const hasMarks = (series) => series.style === "points" || (series.style === "line" && series.points.length <= 40);

function makeChart(chart) {
  const host = make("div", { class: "plot" });
  const figure = make("figure", { class: `chart ${chart.kind}` }, make("h3", {}, chart.title), makeLegend(chart), host);
  if (chart.note) figure.append(make("p", { class: "note" }, chart.note));
  const rows = chart.table.rows.length;
  figure.append(rows > 14 ? makeLateTable(`The ${rows} rows behind this picture`, () => chart.table) : makeTable(chart.table));
  addPicture(host, (width) => drawChart(host, chart, width));
  return figure;
}

function makeLegend(chart) {
  if (chart.series.length < 2) return make("div", { class: "legend" });
  const entries = chart.series.map((series, place) => {
    const swatch = makeSvg("svg", { width: 26, height: 12, viewBox: "0 0 26 12", "aria-hidden": "true" });
    if (chart.kind === "lines") {
      if (series.style !== "points") {
        swatch.append(makeSvg("path", { class: `line c${series.color} ${series.style}`, d: "M0 6H26" }));
      }
      if (hasMarks(series)) swatch.append(makeSvg("path", { class: `dot c${series.color}`, d: MARKS[place % 8](13, 6) }));
    } else {
      swatch.append(makeSvg("rect", { class: `bar c${series.color}`, width: 20, height: 12, rx: 2 }));
    }
    return make("span", {}, swatch, series.name);
  });
  return make("div", { class: "legend" }, ...entries);
}

function drawChart(host, chart, width) {
  const draw = { lines: drawLines, columns: drawColumns, stacked: drawStacked }[chart.kind];
  host.replaceChildren(draw(chart, width));
}

function makeAxis(values, { log }, from, to, fromZero) {
  let low = Math.min(...values);
  let high = Math.max(...values);
  if (log && low > 0) {
    if (low === high) high = low * 10;
    const pad = (Math.log10(high) - Math.log10(low)) * 0.04;
    const [first, last] = [Math.log10(low) - pad, Math.log10(high) + pad];
    return { low, high, log: true, at: (value) => from + ((Math.log10(value) - first) / (last - first)) * (to - from) };
  }
  if (fromZero) low = Math.min(0, low);
  if (low === high) high = low + 1;
  const pad = (high - low) * 0.04;
  if (!fromZero) low -= pad;
  high += pad;
  return { low, high, log: false, at: (value) => from + ((value - low) / (high - low)) * (to - from) };
}

function ticksOf(axis, values, most, counts) {
  const own = [...new Set(values)].sort((a, b) => a - b);
  if (counts && own.length <= most) return own; // there is no half an epoch
  if (axis.log) {
    const ticks = logTicks(axis.low, axis.high, most).filter((tick) => tick >= axis.low * 0.8 && tick <= axis.high * 1.2);
    if (ticks.length >= 3 || own.length > most) return ticks.length ? ticks : own;
    return own.length <= most ? own : own.filter((_, place) => place % Math.ceil(own.length / most) === 0);
  }
  const ticks = linearTicks(axis.low, axis.high, most).filter((tick) => tick >= axis.low && tick <= axis.high);
  return counts ? ticks.filter(Number.isInteger) : ticks;
}

function drawLines(chart, width) {
  const height = Math.min(340, Math.max(230, width * 0.42));
  const [left, right, top, bottom] = [62, width - 14, 10, height - 44];
  const svg = makeSvg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img", "aria-label": chart.title });
  const add = (tag, attributes, ...children) => svg.appendChild(makeSvg(tag, attributes, ...children));
  const points = chart.series.flatMap((series) => series.points);
  if (!points.length) return svg;
  const xs = points.map((point) => point[0]);
  const ys = points.map((point) => point[1]);
  const x = makeAxis(xs, chart.x, left, right, false);
  const share = chart.y.unit === "%";
  const y = makeAxis(share ? [...ys, 0] : ys, chart.y, bottom, top, !chart.y.log);
  const whole = chart.x.log && chart.x.unit === "";
  const xTicks = whole ? pickTicks(roundCounts(xs), x, 34) : ticksOf(x, xs, Math.max(2, width / 90), chart.x.unit === "");
  for (const tick of xTicks) {
    const at = x.at(tick).toFixed(1);
    add("line", { class: "grid", x1: at, x2: at, y1: top, y2: bottom });
    add("text", { class: "tick", x: at, y: bottom + 16, "text-anchor": "middle" }, FORMATS[chart.x.unit](tick));
  }
  const yTicks = chart.y.log && chart.y.unit === "" ? pickTicks(powersOfTwo(y.low, y.high), y, 26) : [];
  for (const tick of yTicks.length > 2 ? yTicks : ticksOf(y, ys, 6)) {
    const at = y.at(tick).toFixed(1);
    add("line", { class: "grid", x1: left, x2: right, y1: at, y2: at });
    add("text", { class: "tick", x: left - 7, y: Number(at) + 4, "text-anchor": "end" }, FORMATS[chart.y.unit](tick));
  }
  add("text", { class: "axis", x: (left + right) / 2, y: height - 6, "text-anchor": "middle" }, chart.x.label);
  const known = [];
  chart.series.forEach((series, place) => {
    const shown = series.points.filter((point) => (!x.log || point[0] > 0) && (!y.log || point[1] > 0));
    const at = shown.map(([px, py]) => [x.at(px), y.at(py)]);
    if (series.style !== "points") {
      const path = at.map(([px, py], index) => `${index ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`).join("");
      add("path", { class: `line c${series.color} ${series.style}`, d: path });
    }
    if (hasMarks(series)) {
      const dots = at.map(([px, py]) => MARKS[place % 8](Number(px.toFixed(1)), Number(py.toFixed(1)))).join("");
      add("path", { class: `dot c${series.color}`, d: dots });
    }
    at.forEach(([px, py], index) => known.push({ px, py, name: series.name, point: shown[index] }));
  });
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const [ex, ey] = [((event.clientX - box.left) * width) / box.width, ((event.clientY - box.top) * width) / box.width];
    const distance = (entry) => (entry.px - ex) ** 2 + (entry.py - ey) ** 2;
    const near = known.reduce((best, entry) => (best && distance(best) <= distance(entry) ? best : entry), null);
    if (!near || distance(near) > 900) return tooltip.hide();
    const [vx, vy] = near.point;
    const label = chart.x.label === "workers" ? plural(vx, "worker") : `${chart.x.label} ${FORMATS[chart.x.unit](vx)}`;
    return tooltip.show([near.name, label, `${chart.y.label} ${FORMATS[chart.y.unit](vy)}`], event.clientX, event.clientY);
  });
  svg.addEventListener("pointerleave", () => tooltip.hide());
  return svg;
}

const powersOfTwo = (low, high) => Array.from({ length: 40 }, (_, power) => 2 ** (power - 10)).filter((value) => value >= low && value <= high);

// Numbers of workers to write on an axis: powers of two where there are some, else the numbers themselves.
function roundCounts(values) {
  const own = [...new Set(values)].sort((a, b) => a - b);
  const powers = own.filter((value) => Number.isInteger(Math.log2(value)));
  return powers.length > 2 ? powers : own;
}

// Of many values those that stand far enough apart to be read.
function pickTicks(values, axis, distance) {
  const picked = [];
  for (const value of values) {
    const last = picked[picked.length - 1];
    if (last === undefined || Math.abs(axis.at(value) - axis.at(last)) >= distance) picked.push(value);
  }
  return picked;
}

function drawColumns(chart, width) {
  const height = Math.min(300, Math.max(220, width * 0.36));
  const [left, right, top, bottom] = [48, width - 8, 16, height - 58];
  const svg = makeSvg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img", "aria-label": chart.title });
  const add = (tag, attributes, ...children) => svg.appendChild(makeSvg(tag, attributes, ...children));
  const values = chart.series.flatMap((series) => series.points.map((point) => point[1]));
  const y = makeAxis([...values, 0], { log: false }, bottom, top, true);
  for (const tick of ticksOf(y, values, 5)) {
    const at = y.at(tick).toFixed(1);
    add("line", { class: "grid", x1: left, x2: right, y1: at, y2: at });
    add("text", { class: "tick", x: left - 6, y: Number(at) + 4, "text-anchor": "end" }, FORMATS[chart.y.unit](tick));
  }
  const slot = (right - left) / Math.max(1, chart.labels.length);
  const bar = Math.min(46, (slot * 0.8) / chart.series.length);
  chart.labels.forEach((label, place) => {
    const middle = left + slot * (place + 0.5);
    const [low, high] = label.split(" to ");
    add("text", { class: "tick", x: middle, y: bottom + 15, "text-anchor": "middle" }, low);
    if (high) add("text", { class: "tick", x: middle, y: bottom + 28, "text-anchor": "middle" }, `to ${high}`);
  });
  chart.series.forEach((series, index) => {
    for (const [place, value] of series.points) {
      const from = left + slot * (place + 0.5) - (bar * chart.series.length) / 2 + bar * index;
      const up = y.at(value);
      add("rect", { class: `bar c${series.color}`, x: from + 1, y: up, width: Math.max(1, bar - 2), height: Math.max(0, bottom - up) });
      if (value && bar > 16) {
        add("text", { class: "tick", x: from + bar / 2, y: up - 4, "text-anchor": "middle" }, FORMATS[chart.y.unit](value));
      }
    }
  });
  add("text", { class: "axis", x: (left + right) / 2, y: height - 8, "text-anchor": "middle" }, chart.x.label);
  return svg;
}

function drawStacked(chart, width) {
  const row = 40;
  const ends = chart.labels.map((_, place) => chart.series.reduce((sum, series) => sum + series.points[place][1], 0));
  const highs = chart.series.flatMap((series) => series.spread.map((pair) => pair[1]));
  const most = Math.max(...ends, ...highs, 0) || 1;
  const show = FORMATS[chart.y.unit];
  const room = width - 92;
  const height = chart.labels.length * row + 4;
  const svg = makeSvg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img", "aria-label": chart.title });
  const add = (tag, attributes, ...children) => svg.appendChild(makeSvg(tag, attributes, ...children));
  chart.labels.forEach((label, place) => {
    const y = place * row;
    add("text", { class: "bar-label", x: 0, y: y + 13 }, label);
    let from = 0;
    for (const series of chart.series) {
      const wide = (series.points[place][1] / most) * room;
      if (wide > 0) {
        const bar = add("rect", { class: `bar c${series.color}`, x: from.toFixed(2), y: y + 18, width: Math.max(0.5, wide - 0.5).toFixed(2), height: 16 });
        const lines = [label, `${series.name}: ${show(series.points[place][1])}`, `together ${show(ends[place])}`];
        bar.addEventListener("pointermove", (event) => tooltip.show(lines, event.clientX, event.clientY));
        bar.addEventListener("pointerleave", () => tooltip.hide());
      }
      from += wide;
      const [low, high] = series.spread[place] || [0, 0];
      if (high > low) {
        const [first, last] = [(low / most) * room, (high / most) * room];
        add("path", { class: "spread", d: `M${first} ${y + 22}v8M${first} ${y + 26}H${last}M${last} ${y + 22}v8` });
        from = Math.max(from, last);
      }
    }
    add("text", { class: "tick", x: from + 7, y: y + 30 }, show(ends[place]));
  });
  return svg;
}
