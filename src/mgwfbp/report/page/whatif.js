// What if there were more workers, more bandwidth, less latency: planned anew in the page, with the planners' own numbers.

function makeWhatIf(cases, names) {
  const section = make("section", { id: "what-if" }, make("h2", {}, "What if"));
  const lead = make("p", {}, "Move workers, bandwidth or start-up time: every planner plans anew.");
  const note = make("p", { class: "note" });
  const verdict = make("p", { class: "verdict", "aria-live": "polite" });
  const controls = make("div", { class: "controls" });
  const steps = make("div", {});
  const table = make("div", {});
  const speedups = make("div", {});
  section.append(lead, controls, verdict, steps, table, speedups, note);

  const state = { place: 0, workers: 0, bandwidth: 0, latency: 0 };
  const chooser = make("select", { id: "what-if-case" }, ...cases.map((entry, place) => make("option", { value: place }, entry.title)));
  if (cases.length > 1) controls.append(make("label", {}, "case ", chooser));
  const sliders = {};
  for (const [key, title] of [["workers", "workers"], ["bandwidth", "bandwidth of a link"], ["latency", "start-up time of a message between two workers"]]) {
    const input = make("input", { type: "range", id: `what-if-${key}`, min: 0, step: 1 });
    const output = make("output", { for: `what-if-${key}` });
    controls.append(make("label", {}, make("span", {}, `${title}: `, output), input));
    input.addEventListener("input", () => {
      state[key] = Number(input.value);
      update();
    });
    sliders[key] = { input, output };
  }
  const reset = make("button", { type: "button" }, "As it was");
  controls.append(reset);

  function start() {
    const entry = cases[state.place];
    const { network, workers, choices } = entry;
    state.workers = choices.workers.indexOf(workers);
    state.bandwidth = Math.max(0, choices.bandwidth.findIndex((choice) => choice[1] === network.per_byte_s));
    state.latency = Math.max(0, choices.latency.findIndex((choice) => choice[1] === network.latency_s));
    for (const [key, { input }] of Object.entries(sliders)) {
      input.max = choices[key].length - 1;
      input.value = state[key];
    }
    note.textContent = entry.note;
    update();
  }

  function update() {
    const entry = cases[state.place];
    const workers = entry.choices.workers[state.workers];
    const [gigabits, per_byte_s] = entry.choices.bandwidth[state.bandwidth];
    const [microseconds, latency_s] = entry.choices.latency[state.latency];
    sliders.workers.output.textContent = String(workers);
    sliders.bandwidth.output.textContent = `${formatDigits(gigabits, 4)} Gbit/s`;
    sliders.latency.output.textContent = `${formatDigits(microseconds, 4)} us`;
    const network = { ...entry.network, per_byte_s, latency_s };
    const found = planAll(entry, networkCost(network, workers));
    const { bucket, optimal } = found;
    const gain = optimal.iteration_s ? bucket.iteration_s / optimal.iteration_s : 1;
    const faster = gain > 1.005 ? `${formatDigits(gain, 3)} times as fast as` : "no faster than";
    verdict.textContent =
      `The best plan sends ${plural(optimal.messages.start.length, "message")} and takes ${formatSeconds(optimal.iteration_s)} a step, ` +
      `${formatSeconds(optimal.exposed_s)} of it exposed: ${faster} PyTorch's default buckets, ` +
      `a speedup of ${formatDigits(optimal.speedup, 4)} on ${plural(workers, "worker")}.`;
    const view = { start: 0, end: Math.max(bucket.iteration_s, optimal.iteration_s) };
    drawWhatIfSteps(steps, entry, names, { bucket, optimal }, view);
    table.replaceChildren(makePlannersTable(found));
    speedups.replaceChildren(makeChart(speedupChart(entry, network)));
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

function planAll(entry, cost) {
  const found = {};
  for (const [name, planner] of Object.entries(PLANNERS)) {
    found[name] = predictStep(entry.model, cost, planner(entry.model, cost, entry.bucket));
  }
  return found;
}

function drawWhatIfSteps(host, entry, names, found, view) {
  host.replaceChildren(
    ...Object.entries(found).map(([name, result]) => {
      const plot = make("div", { class: "plot", "data-what-if": name });
      const step = whatIfStep(entry, names, name, result);
      addPicture(plot, (width) => drawStep(plot, step, view, width, null));
      return make("div", { class: "step" }, make("h4", {}, stepTitle(step)), plot);
    }),
  );
}

function whatIfStep(entry, names, name, result) {
  const { ready, messages } = result;
  const start = [entry.model.forward_s, ...ready.slice(0, -1)];
  const nameOf = (layer) => names[entry.names[layer]];
  return {
    name,
    how: "planned here",
    forward: [0, entry.model.forward_s],
    backward: { start, end: ready, bytes: entry.model.grad_bytes, layers: (place) => [nameOf(place)] },
    messages: {
      ...messages,
      layers: (place) => Array.from({ length: messages.count[place] }, (_, layer) => nameOf(messages.first[place] + layer)),
    },
    compute_s: result.compute_s,
    iteration_s: result.iteration_s,
  };
}

function makePlannersTable(found) {
  const titles = ["planner", "messages", "step", "exposed", "speedup", "efficiency"];
  const rows = Object.entries(found).map(([name, result]) => [
    name,
    String(result.messages.start.length),
    formatSeconds(result.iteration_s),
    formatSeconds(result.exposed_s),
    formatDigits(result.speedup, 4),
    `${(result.efficiency * 100).toFixed(1)}%`,
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

const STRATEGY_COLORS = { optimal: 0, mgwfbp: 1, wfbp: 2, single: 3, bucket: 4 };

function speedupChart(entry, network) {
  const counts = entry.choices.workers;
  const values = {};
  for (const count of counts) {
    for (const [name, result] of Object.entries(planAll(entry, networkCost(network, count)))) {
      (values[name] = values[name] || []).push([count, result.speedup]);
    }
  }
  const shown = [2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096];
  const series = Object.entries(values).map(([name, points]) => ({ name, points, color: STRATEGY_COLORS[name], style: "line", spread: [] }));
  series.push({ name: "linear", points: counts.map((count) => [count, count]), color: 6, style: "dashed", spread: [] });
  return {
    title: "Speedup on such a network",
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
