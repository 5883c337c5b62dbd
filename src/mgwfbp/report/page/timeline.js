// Steps laid out in time: computation above, messages below, what nothing hides marked.
//
// A step is {forward: [start, end], backward, messages, compute_s, iteration_s}, and where parameters are gathered in the
// forward pass {gathers, waited_s}; backward, messages and gathers are columns
// {start, end, bytes, ready?} and `layers(place)` gives the names of one entry. Messages may have a column `wire`: the low
// precision that each travels in, "" for that of its gradients. A step of FSDP2 has its forward pass in pieces (`forwards`),
// gathers in both passes, and says itself when nothing is computed: `idle`, pairs of moments.

const GUTTER = 72;
const LANE = 22;
const GAP = 5;
const AXIS = 20;
const TOP = 4;
const MARK = 13;
const STRIPE = 7;
const MOST_NAMES = 6;

function scaleOf(view, width) {
  const inner = Math.max(40, width - GUTTER - 6);
  return (time) => GUTTER + ((time - view.start) / (view.end - view.start || 1)) * inner;
}

// One path for many rectangles: thousands of messages are two elements.
function rectangles(spans, x, y, height, limits, keep) {
  const parts = [];
  for (let place = 0; place < spans.start.length; place++) {
    if (!keep(place) || spans.end[place] < limits.start || spans.start[place] > limits.end) continue;
    const left = x(Math.max(spans.start[place], limits.start));
    const right = x(Math.min(spans.end[place], limits.end));
    const wide = right - left;
    const shown = wide > 6 ? wide - 0.8 : Math.max(wide, 0.5);
    parts.push(`M${left.toFixed(2)} ${y}h${shown.toFixed(2)}v${height}h${(-shown).toFixed(2)}z`);
  }
  return parts.join("");
}

// Slanted lines over the same rectangles, for messages in low precision: they are told apart without colour.
function stripes(spans, x, y, height, limits, keep) {
  const parts = [];
  for (let place = 0; place < spans.start.length; place++) {
    if (!keep(place) || spans.end[place] < limits.start || spans.start[place] > limits.end) continue;
    const left = x(Math.max(spans.start[place], limits.start));
    const right = x(Math.min(spans.end[place], limits.end));
    for (let foot = left + STRIPE / 2 - height; foot < right; foot += STRIPE) {
      const [from, to] = [Math.max(foot, left), Math.min(foot + height, right)];
      parts.push(`M${from.toFixed(1)} ${(y + height - (from - foot)).toFixed(1)}L${to.toFixed(1)} ${(y + height - (to - foot)).toFixed(1)}`);
    }
  }
  return parts.join("");
}

function drawStep(host, step, view, width, onZoom) {
  const x = scaleOf(view, width);
  const laneY = { compute: TOP, messages: TOP + LANE + GAP };
  const markY = laneY.messages + LANE + 2;
  const bottom = markY + MARK;
  const svg = makeSvg("svg", {
    class: "timeline",
    viewBox: `0 0 ${width} ${bottom + AXIS}`,
    width: "100%",
    tabindex: 0,
    role: "img",
    "aria-label": `${step.name}, ${step.known}: ${messageWords(step)}, step ${formatSeconds(step.iteration_s)}`,
  });
  const add = (tag, attributes, ...children) => svg.appendChild(makeSvg(tag, attributes, ...children));
  for (const tick of linearTicks(view.start, view.end, width / 110)) {
    const at = x(tick).toFixed(2);
    add("line", { class: "grid", x1: at, x2: at, y1: TOP, y2: bottom });
    const anchor = tick === 0 ? "start" : x(tick) > width - 30 ? "end" : "middle";
    add("text", { class: "tick", x: at, y: bottom + 14, "text-anchor": anchor }, formatSeconds(tick));
  }
  for (const [lane, y] of Object.entries(laneY)) {
    add("text", { class: "lane", x: 0, y: y + LANE / 2 + 4 }, lane === "compute" ? "compute" : "messages");
  }
  const forward = forwardSpans(step);
  const even = (place) => place % 2 === 0;
  const odd = (place) => place % 2 === 1;
  const lanes = [
    ["forward", forward, laneY.compute, () => true],
    ["gradient", step.backward, laneY.compute, even],
    ["gradient other", step.backward, laneY.compute, odd],
    ...(step.gathers ? [["message", step.gathers, laneY.messages, even]] : []),
    ...(step.gathers ? [["message other", step.gathers, laneY.messages, odd]] : []),
    ["message", step.messages, laneY.messages, even],
    ["message other", step.messages, laneY.messages, odd],
  ];
  for (const [kind, spans, y, keep] of lanes) {
    add("path", { class: kind, d: rectangles(spans, x, y, LANE, view, keep) });
  }
  labelLane(add, x, view, step.forward, laneY.compute, "forward");
  labelLane(add, x, view, [step.forward[1], step.compute_s], laneY.compute, "backward");
  for (const [from, to, spans] of exposedParts(step)) {
    const left = x(Math.max(from, view.start));
    const right = x(Math.min(to, view.end));
    if (right <= left) continue;
    const bare = { start: [], end: [] };
    for (let place = 0; place < spans.start.length; place++) {
      if (spans.end[place] <= from || spans.start[place] >= to) continue;
      bare.start.push(Math.max(from, spans.start[place]));
      bare.end.push(Math.min(to, spans.end[place]));
    }
    add("path", { class: "exposed even", d: rectangles(bare, x, laneY.messages, LANE, view, even) });
    add("path", { class: "exposed odd", d: rectangles(bare, x, laneY.messages, LANE, view, odd) });
    const end = to <= view.end ? "v-5" : ""; // open where it goes on beyond the picture
    add("path", { class: "mark", d: `M${left} ${markY}v5H${right}${end}` });
    const text = `exposed ${formatSeconds(to - from)}`;
    const room = right - left > text.length * 7.4;
    const place = room ? { x: (left + right) / 2, "text-anchor": "middle" } : { x: left - 6, "text-anchor": "end" };
    if (room || left > GUTTER + text.length * 7.4) {
      add("text", { class: "exposed-label", y: room ? laneY.compute + LANE / 2 + 4 : markY + MARK - 2, ...place }, text);
    }
  }
  const isLow = (place) => Boolean(step.messages.wire && step.messages.wire[place]);
  if (hasLow(step)) add("path", { class: "low", d: stripes(step.messages, x, laneY.messages, LANE, view, isLow) });
  const frame = add("rect", { class: "chosen", height: LANE, visibility: "hidden" });
  host.replaceChildren(svg);
  listen(svg, step, view, x, laneY, frame, onZoom);
}

const forwardSpans = (step) => step.forwards ?? { start: [step.forward[0]], end: [step.forward[1]] };

// What nothing hides: messages after the backward pass, and gathers that the forward pass waits for.
function exposedParts(step) {
  const parts = [];
  if (step.idle) {
    const sent = { start: [...step.gathers.start, ...step.messages.start], end: [...step.gathers.end, ...step.messages.end] };
    return step.idle.map(([from, to]) => [from, to, sent]);
  }
  if (step.waited_s > 0) parts.push([0, step.waited_s, step.gathers]);
  if (step.iteration_s > step.compute_s) parts.push([step.compute_s, step.iteration_s, step.messages]);
  return parts;
}

const hasLow = (step) => Boolean(step.messages.wire && step.messages.wire.some(Boolean));
const sentBytes = (bytes, wire) => (wire ? bytes - Math.floor(bytes / 2) : bytes);

function labelLane(add, x, view, [start, end], y, text) {
  const left = x(Math.max(start, view.start));
  const right = x(Math.min(end, view.end));
  if (right - left > text.length * 8) {
    add("text", { class: "on-lane", x: (left + right) / 2, y: y + LANE / 2 + 4, "text-anchor": "middle" }, text);
  }
}

function listen(svg, step, view, x, laneY, frame, onZoom) {
  const width = svg.viewBox.baseVal.width;
  const numGathers = step.gathers ? step.gathers.start.length : 0;
  let chosen = -1; // of gathers, then messages
  let dragFrom = null;
  const position = (event) => {
    const box = svg.getBoundingClientRect();
    const scale = width / box.width;
    return { x: (event.clientX - box.left) * scale, y: (event.clientY - box.top) * scale };
  };
  const timeAt = (pixel) => view.start + ((pixel - GUTTER) / (x(view.end) - GUTTER)) * (view.end - view.start);
  const show = (lane, place, clientX, clientY) => {
    const spans = lane === "forward" ? forwardSpans(step) : step[lane];
    const left = x(Math.max(spans.start[place], view.start));
    const right = Math.max(left + 1, x(Math.min(spans.end[place], view.end)));
    frame.setAttribute("x", left);
    frame.setAttribute("y", lane === "messages" || lane === "gathers" ? laneY.messages : laneY.compute);
    frame.setAttribute("width", right - left);
    frame.setAttribute("visibility", "visible");
    tooltip.show(describe(step, lane, place), clientX, clientY);
  };
  const hide = () => {
    frame.setAttribute("visibility", "hidden");
    tooltip.hide();
  };
  const point = (event) => {
    const at = position(event);
    const inMessages = at.y >= laneY.messages - GAP / 2;
    const near = (3 * (view.end - view.start)) / width;
    const time = timeAt(at.x);
    const early = time < step.forward[1];
    const gathering = step.idle ? findSpan(step.gathers, time, near) >= 0 : early && step.gathers;
    const lane = inMessages ? (gathering ? "gathers" : "messages") : early ? "forward" : "backward";
    const place = lane === "forward" && !step.forwards ? 0 : findSpan(lane === "forward" ? forwardSpans(step) : step[lane], time, near);
    if (at.x < GUTTER - 4 || place < 0) return hide();
    if (inMessages) chosen = lane === "gathers" ? place : numGathers + place;
    show(lane, place, event.clientX, event.clientY);
  };
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "mouse") dragFrom = position(event).x;
    point(event);
  });
  svg.addEventListener("pointerup", (event) => {
    const to = position(event).x;
    if (dragFrom !== null && Math.abs(to - dragFrom) > 12 && onZoom) {
      const [start, end] = [timeAt(Math.min(dragFrom, to)), timeAt(Math.max(dragFrom, to))];
      tooltip.hide();
      onZoom({ start: Math.max(0, start), end });
    }
    dragFrom = null;
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("dblclick", () => onZoom && onZoom(null));
  svg.addEventListener("keydown", (event) => {
    const step_ = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") return hide();
    if (!step_) return undefined;
    event.preventDefault();
    chosen = Math.min(Math.max(0, chosen + step_), numGathers + step.messages.start.length - 1);
    const [lane, place] = chosen < numGathers ? ["gathers", chosen] : ["messages", chosen - numGathers];
    const box = svg.getBoundingClientRect();
    const middle = (step[lane].start[place] + step[lane].end[place]) / 2;
    return show(lane, place, box.left + (x(middle) * box.width) / width, box.top + laneY.messages + LANE);
  });
}

// The span that covers the time, or the nearest that is no further than `near`.
function findSpan(spans, time, near) {
  let best = -1;
  let distance = near;
  for (let place = 0; place < spans.start.length; place++) {
    const away = Math.max(spans.start[place] - time, time - spans.end[place], 0);
    if (away < distance || (away === 0 && distance === 0 && best < 0)) {
      best = place;
      distance = away;
      if (away === 0) break;
    }
  }
  return best;
}

// What a part of FSDP2's step is: its kind, when, and of which modules.
function describePart(spans, place, title) {
  const names = spans.layers(place);
  const more = names.length > MOST_NAMES ? [`… and ${names.length - MOST_NAMES} more`] : [];
  const times = `${formatSeconds(spans.start[place])} to ${formatSeconds(spans.end[place])}, takes ${formatSeconds(spans.end[place] - spans.start[place])}`;
  return [`${title}: ${plural(names.length, "module")}, ${formatBytes(spans.bytes[place])}`, times, ...names.slice(0, MOST_NAMES), ...more];
}

const PARTS = { forward: "forward pass", backward: "backward pass", messages: "reduce-scatter" };

function describe(step, lane, place) {
  if (step.idle) {
    const spans = lane === "forward" ? step.forwards : step[lane];
    return describePart(spans, place, lane === "gathers" ? spans.kind[place] : PARTS[lane]);
  }
  if (lane === "forward") {
    const waited = step.waited_s > 0 ? [`waited ${formatSeconds(step.waited_s)} for gathers, drawn in front of it`] : [];
    return ["forward pass", `${formatSeconds(step.forward[0])} to ${formatSeconds(step.forward[1])}`, ...waited];
  }
  const spans = step[lane];
  const names = spans.layers(place);
  const takes = `takes ${formatSeconds(spans.end[place] - spans.start[place])}`;
  if (lane === "backward") {
    return [
      `gradient ${names[0] ?? place + 1}`,
      `${formatBytes(spans.bytes[place])}, ${takes}`,
      `computed from ${formatSeconds(spans.start[place])}, ready at ${formatSeconds(spans.end[place])}`,
    ];
  }
  const more = names.length > MOST_NAMES ? [`… and ${names.length - MOST_NAMES} more`] : [];
  if (lane === "gathers") {
    return [
      `gather ${place + 1} of ${spans.start.length}: ${plural(names.length, "parameter")}, ${formatBytes(spans.bytes[place])}`,
      `start ${formatSeconds(spans.start[place])}, end ${formatSeconds(spans.end[place])}, ${takes}`,
      ...names.slice(0, MOST_NAMES),
      ...more,
    ];
  }
  const waits = spans.start[place] - spans.ready[place];
  const late = spans.end[place] - Math.max(spans.start[place], step.compute_s);
  return [
    `message ${place + 1} of ${spans.start.length}: ${plural(names.length, "gradient")}, ${formatBytes(spans.bytes[place])}`,
    ...(spans.wire && spans.wire[place] ? [`travels in ${spans.wire[place]}: ${formatBytes(sentBytes(spans.bytes[place], true))} sent`] : []),
    `ready ${formatSeconds(spans.ready[place])}, start ${formatSeconds(spans.start[place])}, end ${formatSeconds(spans.end[place])}`,
    `waits ${formatSeconds(Math.max(0, waits))}, ${takes}${late > 0 ? `, ${formatSeconds(late)} of it exposed` : ""}`,
    ...names.slice(0, MOST_NAMES),
    ...more,
  ];
}

function messageTable(step) {
  const { ready, start, end, bytes, wire } = step.messages;
  const low = hasLow(step);
  return {
    titles: ["message", step.idle ? "modules" : "gradients", "bytes", ...(low ? ["travels in", "sent"] : []), "ready", "start", "end", "takes", "from", "to"],
    rows: [...gatherRows(step, low), ...start.map((_, place) => {
      const names = step.messages.layers(place);
      return [
        String(place + 1),
        String(names.length),
        formatBytes(bytes[place]),
        ...(low ? [wire[place] || "its own", formatBytes(sentBytes(bytes[place], wire[place]))] : []),
        formatSeconds(ready[place]),
        formatSeconds(start[place]),
        formatSeconds(end[place]),
        formatSeconds(end[place] - start[place]),
        names[0] ?? "",
        names[names.length - 1] ?? "",
      ];
    })],
  };
}

function gatherRows(step, low) {
  if (!step.gathers) return [];
  const { start, end, bytes } = step.gathers;
  return start.map((_, place) => {
    const names = step.gathers.layers(place);
    const times = [0, start[place], end[place], end[place] - start[place]].map(formatSeconds);
    const sent = low ? ["its own", formatBytes(bytes[place])] : [];
    return [`gather ${place + 1}`, String(names.length), formatBytes(bytes[place]), ...sent, ...times, names[0] ?? "", names[names.length - 1] ?? ""];
  });
}
