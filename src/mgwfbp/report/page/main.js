// The page: words first, then pictures, each above its table.

const page = JSON.parse(document.getElementById("records").textContent);

function namesOf(ranges) {
  const found = [];
  for (let place = 0; place < ranges.length; place += 2) {
    for (let layer = 0; layer < ranges[place + 1]; layer++) found.push(page.names[ranges[place] + layer]);
  }
  return found;
}

const withLayers = (spans) => ({ ...spans, layers: (place) => namesOf(spans.ranges[place]) });

function decodeStep(data) {
  if (data.idle) {
    const columns = ["forwards", "backward", "messages", "gathers"].map((name) => [name, withLayers(data[name])]);
    return { ...data, ...Object.fromEntries(columns) };
  }
  const backward = page.backwards[data.backward];
  return {
    ...data,
    backward: { ...backward, layers: (place) => namesOf(backward.ranges[place]) },
    messages: { ...data.messages, layers: (place) => namesOf(data.messages.ranges[place]) },
    ...(data.gathers ? { gathers: { ...data.gathers, layers: (place) => namesOf(data.gathers.ranges[place]) } } : {}),
  };
}

function stepTitle(step) {
  if (step.words) return step.words;
  const exposed = step.iteration_s - step.compute_s + (step.waited_s ?? 0);
  const share = step.iteration_s ? exposed / step.iteration_s : 0;
  return (
    `${step.name}, ${step.known}: ${messageWords(step)}, step ${formatSeconds(step.iteration_s)}, ` +
    `exposed ${formatSeconds(exposed)} (${formatDigits(share * 100, 3)} %)${lowWords(step)}`
  );
}

// mgwfbp.report.words.message_words
function messageWords(step) {
  const gathers = step.gathers ? ` and ${plural(step.gathers.start.length, "gather")}` : "";
  return `${plural(step.messages.start.length, "message")}${gathers}`;
}

// mgwfbp.report.words.low_words
function lowWords(step) {
  if (!hasLow(step)) return "";
  const { bytes, wire } = step.messages;
  const sum = (some) => some.reduce((total, size) => total + size, 0);
  const share = sum(bytes.filter((_, place) => wire[place])) / (sum(bytes) || 1);
  return `, ${(share * 100).toFixed(0)}% of the bytes in ${[...new Set(wire.filter(Boolean))].join(" and ")}`;
}

const LEGEND = [
  ["forward", "forward pass"],
  ["gradient", "backward pass, gradient by gradient"],
  ["message", "message, hidden behind computation"],
  ["exposed", "exposed: nothing hides it"],
];

function makeTimelineLegend(low) {
  const entries = LEGEND.map(([kind, words]) => {
    const swatch = makeSvg("svg", { width: 20, height: 12, viewBox: "0 0 20 12", "aria-hidden": "true" });
    swatch.append(makeSvg("path", { class: kind, d: "M0 0h20v12h-20z" }));
    return make("span", {}, swatch, words);
  });
  if (low) {
    const swatch = makeSvg("svg", { width: 20, height: 12, viewBox: "0 0 20 12", "aria-hidden": "true" });
    const whole = { start: [0], end: [20] };
    swatch.append(makeSvg("path", { class: "message", d: "M0 0h20v12h-20z" }));
    swatch.append(makeSvg("path", { class: "low", d: stripes(whole, (at) => at, 0, 12, { start: 0, end: 20 }, () => true) }));
    entries.push(make("span", {}, swatch, "striped: in low precision, half the bytes are sent"));
  }
  return make("div", { class: "legend" }, ...entries);
}

// Steps one above the other on one time axis; looking closer at one looks closer at all.
function addSteps(section, steps) {
  section.append(makeTimelineLegend(steps.some(hasLow)));
  const lengths = steps.map((step) => step.iteration_s);
  const whole = { start: 0, end: Math.max(...lengths) };
  const shortest = Math.min(...lengths);
  let view = whole;
  const back = make("button", { type: "button", hidden: "" }, "Show whole steps");
  const closer = make("button", { type: "button" }, "Look closer at the short steps");
  closer.hidden = whole.end < 2 * shortest;
  section.append(make("p", { class: "hint" }, "All steps are drawn to one scale. Point at a message to see what it carries; drag to look closer. ", closer, " ", back));
  const redraw = [];
  const zoom = (wanted) => {
    view = wanted || whole;
    back.hidden = view === whole;
    for (const draw of redraw) draw();
  };
  closer.addEventListener("click", () => zoom({ start: 0, end: 1.2 * shortest }));
  back.addEventListener("click", () => zoom(null));
  for (const data of steps) {
    const step = decodeStep(data);
    const plot = make("div", { class: "plot", "data-step": step.name, "data-how": step.how });
    addPicture(plot, (width) => drawStep(plot, step, view, width, zoom));
    redraw.push(() => drawStep(plot, step, view, plot.clientWidth, zoom));
    const title = `The ${messageWords(step)} of ${step.name}, ${step.known}`;
    section.append(make("div", { class: "step" }, make("h4", {}, stepTitle(step)), plot, makeLateTable(title, () => messageTable(step))));
  }
}

// A step of FSDP2: the rest of the model is called so.
function makeFsdp(entry) {
  const section = make("section", { class: "fsdp" }, make("h2", {}, entry.title));
  if (entry.summary.length) section.append(makeWords("more", entry.summary));
  addSteps(section, entry.steps);
  return section;
}

function makeMeasured(entry) {
  const section = make("section", { class: "measured" }, make("h2", {}, entry.title));
  addSteps(section, entry.steps);
  section.append(make("p", { class: "note" }, entry.note));
  return section;
}

function makeCase(entry) {
  const section = make("section", { class: "case" }, make("h2", {}, entry.title));
  if (entry.summary.length) section.append(makeWords("more", entry.summary));
  if (entry.steps.length) addSteps(section, entry.steps);
  section.append(makeChart(entry.breakdown));
  return section;
}

// A sentence a line.
const makeWords = (kind, sentences) => make("p", { class: kind }, ...sentences.map((sentence) => make("span", {}, `${sentence} `)));

function makeGroup(group) {
  const section = make("section", { id: group.id }, make("h2", {}, group.title));
  if (group.summary.length) section.append(makeWords("more", group.summary));
  section.append(make("div", { class: "charts" }, ...group.charts.map(makeChart)));
  return section;
}

function build() {
  const main = document.querySelector("main");
  main.replaceChildren(make("h1", {}, page.title));
  if (page.lead.length) main.append(makeWords("lead", page.lead));
  for (const entry of page.measured) main.append(makeMeasured(entry));
  for (const entry of page.cases) main.append(makeCase(entry));
  for (const entry of page.fsdp) main.append(makeFsdp(entry));
  if (page.what_if.length) main.append(makeWhatIf(page.what_if, page.names));
  for (const group of page.groups) main.append(makeGroup(group));
  main.append(make("section", { id: "inputs" }, make("h2", {}, "What this was made from"), makeTable(page.inputs)));
  const words = make("section", { id: "words" }, make("h2", {}, "Words"));
  for (const [term, meaning] of page.glossary) words.append(make("p", { class: "note" }, make("strong", {}, term), ` ${meaning}`));
  main.append(words);
  drawPictures(true);
  document.documentElement.dataset.ready = "yes";
}

build();
window.addEventListener("resize", () => drawPictures(false));
// On paper nothing can be opened.
window.addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("figure details")) details.open = true;
});
window.addEventListener("scroll", () => tooltip.hide(), { passive: true });
