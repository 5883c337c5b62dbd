// What if there were more workers, more bandwidth, less latency: planned anew in the page, with the planners' own numbers.

function makeWhatIf(cases, names) {
  const section = make("section", { id: "what-if" }, make("h2", {}, "What if"));
  const lead = make("p", {}, "Move workers, bandwidth or start-up time, or choose how messages travel: every planner plans anew. All numbers here are predicted.");
  const note = make("p", { class: "note" });
  const reading = make("p", { class: "note reading" });
  const verdict = make("p", { class: "verdict", "aria-live": "polite" });
  const controls = make("div", { class: "controls" });
  const steps = make("div", {});
  const table = make("div", {});
  const speedups = make("div", {});
  section.append(lead, controls, reading, verdict, steps, table, note, speedups);

  const state = { place: 0, workers: 0, bandwidth: 0, startup: 0 };
  const chooser = make("select", { id: "what-if-case" }, ...cases.map((entry, place) => make("option", { value: place }, entry.title)));
  if (cases.length > 1) controls.append(make("label", { class: "chooser" }, "case", chooser));
  const sliders = {};
  for (const key of ["workers", "bandwidth", "startup"]) {
    const input = make("input", { type: "range", id: `what-if-${key}`, min: 0, step: 1 });
    const title = make("span", {});
    const output = make("output", { for: `what-if-${key}` });
    controls.append(make("label", {}, make("span", {}, title, ": ", output), input));
    input.addEventListener("input", () => {
      state[key] = Number(input.value);
      update();
    });
    sliders[key] = { input, title, output };
  }
  const precision = make("select", { id: "what-if-precision" });
  precision.append(make("option", { value: "" }, "as they are"), make("option", { value: LOW }, `${LOW} (all)`));
  controls.append(make("label", {}, "precision of messages", precision));
  precision.addEventListener("change", () => update());
  const reset = make("button", { type: "button" }, "As it was");
  controls.append(reset);

  function start() {
    const entry = cases[state.place];
    for (const [key, { input, title }] of Object.entries(sliders)) {
      const slider = entry.sliders[key];
      title.textContent = slider.title;
      state[key] = slider.start;
      input.max = slider.choices.length - 1;
      input.value = slider.start;
    }
    precision.value = "";
    note.textContent = entry.note;
    update();
  }

  function update() {
    const entry = cases[state.place];
    const chosen = { wire: precision.value };
    for (const [key, { input, output }] of Object.entries(sliders)) {
      const [label, value] = entry.sliders[key].choices[state[key]];
      output.textContent = label;
      input.setAttribute("aria-valuetext", label);
      chosen[key] = value;
    }
    const cost = costOf(entry, chosen, chosen.workers);
    const low = costOf(entry, { ...chosen, wire: LOW }, chosen.workers);
    const found = planAll(entry, cost, chosen.wire);
    reading.textContent = readCost(entry, cost, chosen.wire);
    verdict.textContent = judge(found, chosen.workers);
    const { bucket, optimal } = found;
    const view = { start: 0, end: Math.max(bucket.iteration_s, optimal.iteration_s) };
    drawWhatIfSteps(steps, entry, names, { bucket, optimal }, view);
    // A plan that is given says itself how its messages travel.
    const given = chosen.wire ? [] : entry.given.map((plan) => [plan.name, predictGiven(entry.model, cost, low, plan)]);
    table.replaceChildren(makePlannersTable({ ...found, ...Object.fromEntries(given) }, entry));
    speedups.replaceChildren(makeChart(speedupChart(entry, chosen)));
    drawPictures(false);
  }

  chooser.addEventListener("change", () => {
    state.place = Number(chooser.value);
    start();
  });
  reset.addEventListener("click", start);
  start();
  return section;
}

// What messages cost on so many workers: a network's sliders say its values, those of a cost how many times it.
function costOf(entry, { bandwidth, startup, wire }, workers) {
  const cost = entry.network
    ? networkCost({ ...entry.network, per_byte_s: bandwidth, latency_s: startup }, workers)
    : scaledCost(entry.cost, workers, startup, bandwidth);
  if (!wire) return cost;
  if (!entry.low_cost) return halvedCost(cost);
  // What was measured goes with the sliders as the cost of other messages does.
  const times = (value, before) => (before ? value / before : 1);
  const longer = entry.network ? times(startup, entry.network.latency_s) : startup;
  const slower = entry.network ? times(bandwidth, entry.network.per_byte_s) : bandwidth;
  return scaledCost(entry.low_cost, workers, longer, slower);
}

function readCost(entry, cost, wire) {
  const bytes = entry.model.grad_bytes.reduce((sum, size) => sum + size, 0);
  return (
    `On ${plural(cost.workers, "worker")} a message of no bytes takes ${formatSeconds(messageTime(cost, 0))}, ` +
    `one of all gradients (${formatBytes(bytes)}) ${formatSeconds(messageTime(cost, bytes))}.` +
    (takenBy(cost, bytes) > 0
      ? ` Each takes ${formatSeconds(takenBy(cost, 0))} from the computation, and all bytes together ${formatSeconds(takenBy(cost, bytes) - takenBy(cost, 0))}.`
      : "") +
    (wire && !entry.low_cost ? ` Messages in ${wire} are taken to cost what half the bytes cost, and converting nothing.` : "") +
    (wire && entry.low_cost ? ` So messages in ${wire} were measured, conversions included.` : "")
  );
}

function judge({ bucket, optimal }, workers) {
  const gain = optimal.iteration_s ? bucket.iteration_s / optimal.iteration_s : 1;
  const faster = gain > 1.005 ? `${formatDigits(gain, 3)} times as fast as` : "no faster than";
  return (
    `The best plan sends ${plural(optimal.messages.start.length, "message")} and takes ${formatSeconds(optimal.iteration_s)} a step, ` +
    `${formatSeconds(optimal.exposed_s)} of it exposed: ${faster} PyTorch's default buckets, ` +
    `a speedup of ${formatDigits(optimal.speedup, 4)} on ${plural(workers, "worker")} (all predicted).`
  );
}

function planAll(entry, cost, wire) {
  const found = {};
  for (const [name, planner] of Object.entries(PLANNERS)) {
    found[name] = predictStep(entry.model, cost, planner(entry.model, cost, entry.bucket));
    if (!wire) continue;
    found[name].messages.wire = found[name].messages.start.map(() => wire);
    found[name].low_bytes = entry.model.grad_bytes.reduce((sum, size) => sum + size, 0);
  }
  return found;
}

function drawWhatIfSteps(host, entry, names, found, view) {
  host.replaceChildren(
    ...(hasLow(found.optimal) ? [makeTimelineLegend(true)] : []),
    ...Object.entries(found).map(([name, result]) => {
      const plot = make("div", { class: "plot", "data-what-if": name });
      const step = whatIfStep(entry, names, name, result);
      addPicture(plot, (width) => drawStep(plot, step, view, width, null));
      return make("div", { class: "step" }, make("h4", {}, stepTitle(step)), plot);
    }),
  );
}

function whatIfStep(entry, names, name, result) {
  const { begin, ready, messages } = result;
  const nameOf = (layer) => names[entry.names[layer]];
  return {
    name,
    known: "predicted, planned here",
    forward: [0, entry.model.forward_s],
    backward: { start: begin, end: ready, bytes: entry.model.grad_bytes, layers: (place) => [nameOf(place)] },
    messages: {
      ...messages,
      layers: (place) => Array.from({ length: messages.count[place] }, (_, layer) => nameOf(messages.first[place] + layer)),
    },
    compute_s: result.compute_s,
    iteration_s: result.iteration_s,
  };
}

function makePlannersTable(found, entry) {
  const low = Object.values(found).some((result) => result.low_bytes);
  const bytes = entry.model.grad_bytes.reduce((sum, size) => sum + size, 0);
  const titles = ["planner", "messages", "step", "exposed", "speedup", "efficiency", ...(low ? ["sent", "low precision"] : [])];
  const rows = Object.entries(found).map(([name, result]) => [
    name,
    String(result.messages.start.length),
    formatSeconds(result.iteration_s),
    formatSeconds(result.exposed_s),
    formatDigits(result.speedup, 4),
    `${(result.efficiency * 100).toFixed(1)}%`,
    ...(low ? [formatBytes(bytes - (result.low_bytes || 0) / 2), `${((100 * (result.low_bytes || 0)) / (bytes || 1)).toFixed(0)}%`] : []),
  ]);
  const table = makeTable({ titles, rows });
  Object.entries(found).forEach(([name, result], place) => {
    const row = table.querySelectorAll("tbody tr")[place];
    row.dataset.planner = name;
    row.dataset.iteration = String(result.iteration_s);
    row.dataset.exposed = String(result.exposed_s);
    row.dataset.speedup = String(result.speedup);
  });
  return table;
}

const LOW = "bfloat16";

const STRATEGY_COLORS = { optimal: 0, mgwfbp: 1, wfbp: 2, single: 3, bucket: 4 };

const MANY_GRADIENTS = 1500; // of so many the best plan for a curve is not found in an instant

function speedupChart(entry, chosen) {
  const shown = [2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096];
  const all = entry.sliders.workers.choices.map((choice) => choice[1]);
  const isQuick = entry.network || !entry.cost.points || entry.model.grad_bytes.length < MANY_GRADIENTS;
  const counts = isQuick ? all : all.filter((count) => shown.includes(count));
  const values = {};
  for (const [name, planner] of Object.entries(PLANNERS)) {
    values[name] = counts.map((count) => {
      const cost = costOf(entry, chosen, count);
      const step = name === "optimal" ? bestStep(entry.model, cost) : predictStep(entry.model, cost, planner(entry.model, cost, entry.bucket));
      return [count, step.speedup];
    });
  }
  const series = Object.entries(values).map(([name, points]) => ({ name, points, color: STRATEGY_COLORS[name], style: "line", spread: [] }));
  series.push({ name: "linear", points: counts.map((count) => [count, count]), color: 6, style: "dashed", spread: [] });
  return {
    title: `Speedup on such a network${chosen.wire ? `, messages in ${chosen.wire}` : ""}, predicted`,
    kind: "lines",
    series,
    x: { label: "workers", unit: "", log: true },
    y: { label: "speedup", unit: "", log: true },
    labels: [],
    note: "",
    table: {
      titles: ["planner", ...shown.map((count) => `${count} workers`)],
      rows: Object.entries(values).map(([name, points]) => [
        name,
        ...shown.map((count) => formatDigits(points.find((point) => point[0] === count)[1], 4)),
      ]),
    },
  };
}
