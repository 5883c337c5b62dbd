// The planners of mgwfbp, operation by operation as in Python, so that every number is the same.
//
// A model is {forward_s, backward_s: [...], grad_bytes: [...]} in ready order; a cost is a straight line {workers,
// startup_s, per_byte_s} or a curve {workers, sizes, times, slopes}, which `makeCurve` makes of [bytes, seconds]; both may
// have taken_s and taken_per_byte_s, what a message takes from the computation.

function readyTimes(model) {
  const ready = [];
  let now = model.forward_s;
  for (const step of model.backward_s) {
    now += step;
    ready.push(now);
  }
  return ready;
}

function prefixBytes(model) {
  const prefix = [0];
  for (const bytes of model.grad_bytes) prefix.push(prefix[prefix.length - 1] + bytes);
  return prefix;
}

// ---- costs: mgwfbp.cost

function makeCurve(workers, points) {
  const sizes = Float64Array.from(points, (point) => point[0]);
  const times = Float64Array.from(points, (point) => point[1]);
  const slopes = times.map((time, place) => (times[place + 1] - time) / (sizes[place + 1] - sizes[place]));
  slopes[slopes.length - 1] = slopes[slopes.length - 2]; // beyond the last point the last slope
  return { workers, sizes, times, slopes };
}

function messageTime(cost, bytes) {
  if (!cost.sizes) return cost.startup_s + cost.per_byte_s * bytes;
  let place = cost.sizes.length - 1;
  while (place >= 0 && cost.sizes[place] > bytes) place--;
  return place < 0 ? cost.times[0] : cost.times[place] + cost.slopes[place] * (bytes - cost.sizes[place]);
}

const takenBy = (cost, bytes) => (cost.taken_s || 0) + (cost.taken_per_byte_s || 0) * bytes;

// mgwfbp.report.whatif.scaled
function scaledCost(cost, workers, startupTimes, perByteTimes) {
  const startup = startupTimes * ((workers - 1) / (cost.workers - 1));
  const perByte = perByteTimes * (((workers - 1) * cost.workers) / (workers * (cost.workers - 1)));
  const { taken_s, taken_per_byte_s } = cost;
  if (!cost.points) {
    return { workers, startup_s: cost.startup_s * startup, per_byte_s: cost.per_byte_s * perByte, taken_s, taken_per_byte_s };
  }
  const more = cost.points[0][1] * (startup - perByte);
  const points = cost.points.map(([size, time]) => [size, time * perByte + more]);
  return { ...makeCurve(workers, points), taken_s, taken_per_byte_s };
}

// mgwfbp.costs.halved: what messages of half the bytes cost, by the bytes that they stand for
function halvedCost(cost) {
  if (!cost.sizes) return { ...cost, per_byte_s: cost.per_byte_s / 2 };
  const points = Array.from(cost.sizes, (size, place) => [2 * size, cost.times[place]]);
  return { ...cost, ...makeCurve(cost.workers, points) };
}

// ---- networks: mgwfbp.network, the paper's Table II

const bitLength = (count) => 32 - Math.clz32(count);
const isPowerOfTwo = (count) => 2 ** (bitLength(count) - 1) === count;

function foldCost(workers, network) {
  if (isPowerOfTwo(workers)) return [0, 0];
  return [2 * network.latency_s, 2 * network.per_byte_s + network.reduce_per_byte_s];
}

const ALGORITHMS = {
  binary_tree(workers, { latency_s, per_byte_s, reduce_per_byte_s }) {
    const levels = bitLength(workers - 1);
    return [2 * latency_s * levels, (2 * per_byte_s + reduce_per_byte_s) * levels];
  },
  recursive_doubling(workers, network) {
    const rounds = bitLength(workers) - 1;
    const [startup, perByte] = foldCost(workers, network);
    return [network.latency_s * rounds + startup, (network.per_byte_s + network.reduce_per_byte_s) * rounds + perByte];
  },
  recursive_halving_doubling(workers, network) {
    const { latency_s, per_byte_s, reduce_per_byte_s } = network;
    const rounds = bitLength(workers) - 1;
    const [startup, perByte] = foldCost(workers, network);
    const halved = 2 * per_byte_s - (2 * per_byte_s + reduce_per_byte_s) / 2 ** rounds + reduce_per_byte_s + perByte;
    return [2 * latency_s * rounds + startup, halved];
  },
  ring(workers, { latency_s, per_byte_s, reduce_per_byte_s }) {
    return [2 * (workers - 1) * latency_s, ((2 * per_byte_s + reduce_per_byte_s) * (workers - 1)) / workers];
  },
};

function networkCost(network, workers) {
  const [startup_s, per_byte_s] = workers > 1 ? ALGORITHMS[network.algorithm](workers, network) : [0, 0];
  return { workers, startup_s, per_byte_s };
}

// ---- planners: model, cost -> sizes of the groups

// mgwfbp.planners.optimal: one way for a straight line, one for a curve, one where messages take from the computation
function planOptimal(model, cost) {
  if (takesTime(model, cost)) return planCounted(model, cost);
  return cost.sizes ? planCurve(model, cost) : planLine(model, cost);
}

const takesTime = (model, cost) => takenBy(cost, model.grad_bytes.reduce((sum, bytes) => sum + bytes, 0)) > 0;

const SLOWER = 1.25;
const NEAR = 1e-3;
const TIE = 1 + 1e-12;
const ROUNDING = 1e-11;

// Of all plans with the shortest step the best one if messages are slower, then the fewest messages.
function withSlack(fewest, least, most) {
  let sizes = fewest(least * (1 + NEAR));
  if (!sizes) {
    let [low, high] = [least, most]; // met by nothing, and by something
    while (high - low > NEAR * low) {
      const middle = (low + high) / 2;
      if (fewest(middle)) high = middle;
      else low = middle;
    }
    sizes = fewest(low * (1 + NEAR));
  }
  return sizes || [1]; // times that no number holds
}

function planLine(model, cost) {
  const ready = readyTimes(model);
  const prefix = prefixBytes(model);
  const { startup_s, per_byte_s } = cost;
  const shortest = lineEnd(ready, prefix, startup_s, per_byte_s);
  // Backwards: each message takes in all that leaves room for it and those after it.
  const fewest = (slowDeadline) => {
    const sizes = [];
    let later = 0;
    for (let last = ready.length; last > 0; ) {
      const now = ready[last - 1];
      const endBytes = prefix[last];
      const room = Math.min(shortest * TIE - now, (slowDeadline - now) / SLOWER) - later;
      let start = last - 1;
      while (start > 0 && startup_s + per_byte_s * (endBytes - prefix[start - 1]) <= room) start--;
      const time = startup_s + per_byte_s * (endBytes - prefix[start]);
      if (time > room + ROUNDING * shortest) return null;
      later += time;
      sizes.unshift(last - start);
      last = start;
    }
    return sizes;
  };
  return withSlack(fewest, lineEnd(ready, prefix, SLOWER * startup_s, SLOWER * per_byte_s), SLOWER * shortest);
}

function lineEnd(ready, prefix, startup_s, per_byte_s) {
  const earliest = [0];
  let free = 0;
  const keys = [];
  const starts = []; // with keys, a window of rising keys; `head` is where it begins
  let head = 0;
  for (let last = 1; last <= ready.length; last++) {
    const now = ready[last - 1];
    const endBytes = prefix[last];
    while (free + 1 < last && earliest[free + 1] <= now) free++;
    while (head < keys.length && starts[head] <= free) head++;
    let end = now + (startup_s + per_byte_s * (endBytes - prefix[free]));
    if (head < keys.length) {
      const start = starts[head];
      end = Math.min(end, earliest[start] + (startup_s + per_byte_s * (endBytes - prefix[start])));
    }
    earliest.push(end);
    const key = end - per_byte_s * endBytes;
    while (keys.length > head && keys[keys.length - 1] >= key) {
      keys.pop();
      starts.pop();
    }
    keys.push(key);
    starts.push(last);
  }
  return earliest[ready.length];
}

function planCurve(model, cost) {
  const ready = [0, ...readyTimes(model)];
  const prefix = prefixBytes(model);
  const num = ready.length - 1;
  const earliest = earliestEnds(ready, prefix, cost, 1);
  const slow = earliestEnds(ready, prefix, cost, SLOWER);
  const shortest = earliest[num] * TIE;
  const fewest = (slowDeadline) => {
    const room = ready.map((now) => Math.min(shortest - now, (slowDeadline - now) / SLOWER));
    const left = ready.map((_, cut) => Math.min(shortest - earliest[cut], (slowDeadline - slow[cut]) / SLOWER) + ROUNDING * shortest);
    return fewestSizes(prefix, cost, room, left);
  };
  return withSlack(fewest, slow[num], SLOWER * shortest);
}

// Round by round, one message more each, the least time of all messages after every cut; the first that reaches the
// first gradient has the fewest.
function fewestSizes(prefix, cost, room, left) {
  const num = prefix.length - 1;
  const after = new Array(num + 1).fill(Infinity);
  after[num] = 0;
  const rounds = [];
  let better = [num];
  while (better.length) {
    const reached = new Array(num + 1).fill(Infinity);
    const ends = new Array(num + 1).fill(0);
    for (const end of better) {
      for (let start = end - 1; start >= 0; start--) {
        const together = messageTime(cost, prefix[end] - prefix[start]) + after[end];
        if (together > room[end]) break; // and so are all that hold more
        if (together < reached[start]) {
          reached[start] = together;
          ends[start] = end;
        }
      }
    }
    rounds.push(ends);
    better = [];
    for (let cut = 0; cut <= num; cut++) if (reached[cut] < after[cut] && reached[cut] <= left[cut]) better.push(cut);
    if (better[0] === 0) return sizesOf(rounds);
    for (const cut of better) after[cut] = reached[cut];
  }
  return null;
}

// Of rounds that each say where the first message after every cut ends, the last first.
function sizesOf(rounds) {
  const sizes = [];
  for (let cut = 0; rounds.length; ) {
    const end = rounds.pop()[cut];
    sizes.push(end - cut);
    cut = end;
  }
  return sizes;
}

// For every cut the earliest end of all gradients before it, if messages take so many times as long.
function earliestEnds(ready, prefix, cost, slower) {
  const earliest = [0];
  let free = 0;
  for (let last = 1; last < ready.length; last++) {
    while (free + 1 < last && earliest[free + 1] <= ready[last]) free++;
    let best = Infinity;
    for (let start = free; start < last; start++) {
      best = Math.min(best, Math.max(earliest[start], ready[last]) + slower * messageTime(cost, prefix[last] - prefix[start]));
    }
    earliest.push(best);
  }
  return earliest;
}

// mgwfbp.planners.counted: on a clock that stops while messages take from the computation, for every number of messages
function planCounted(model, cost) {
  const row = makeRow(model, cost);
  const ends = shortestEnds(row, 1);
  const shortest = Math.min(...ends);
  let counts = [null];
  let slow;
  if (row.launch * (row.num + 1) <= (TIE - 1) * shortest) {
    slow = Math.min(...shortestEnds(row, SLOWER));
  } else {
    counts = ends.flatMap((end, place) => (end <= shortest * TIE ? [place + 1] : []));
    const ofCount = slowEnds(row, counts[counts.length - 1]);
    slow = Math.min(...counts.map((count) => ofCount[count - 1]));
  }
  const fewest = (slowDeadline) => {
    for (const count of counts) {
      const sizes = sizesWithin(row, shortest * TIE, slowDeadline, count);
      if (sizes) return sizes;
    }
    return null;
  };
  return withSlack(fewest, slow, SLOWER * shortest);
}

function makeRow(model, cost) {
  const ready = [0, ...readyTimes(model)];
  const prefix = prefixBytes(model);
  const num = ready.length - 1;
  const launch = takenBy(cost, 0);
  const times = []; // of the message from one cut to a later one
  for (let start = 0; start < num; start++) {
    times.push(new Float64Array(num + 1).fill(Infinity));
    for (let end = start + 1; end <= num; end++) times[start][end] = messageTime(cost, prefix[end] - prefix[start]);
  }
  return {
    ready,
    prefix,
    num,
    launch,
    times,
    taken: prefix.map((bytes) => takenBy(cost, bytes) - launch),
    last: messageTime(cost, prefix[num] - prefix[num - 1]),
    least: messageTime(cost, 0),
    leastPerByte: leastPerByte(cost, prefix[num]),
  };
}

function leastPerByte(cost, total) {
  if (!cost.sizes) return cost.per_byte_s;
  if (!total) return 0;
  const sizes = [...cost.sizes.filter((size) => size > 0 && size < total), total];
  return Math.min(...sizes.map((size) => (messageTime(cost, size) - messageTime(cost, 0)) / size));
}

// The shortest step of one message, of two, and so on, as far as it may be the shortest of all.
function shortestEnds(row, slower) {
  let free = new Array(row.num + 1).fill(Infinity);
  free[0] = 0;
  const fewer = new Array(row.num + 1).fill(Infinity);
  const ends = [];
  let shortest = Infinity;
  for (let active = [0]; active.length; ) {
    free = oneMore(row, free, active, ends.length, slower);
    ends.push(free[row.num]);
    shortest = Math.min(shortest, free[row.num]);
    active = [];
    for (let cut = 0; cut <= row.num; cut++) {
      const lag = ends.length * row.launch + row.taken[cut];
      const left = row.least + row.leastPerByte * (row.prefix[row.num] - row.prefix[cut]);
      const bound = Math.max(free[cut] + slower * left, row.ready[row.num] + lag + slower * row.last);
      const clock = free[cut] - lag;
      if (cut < row.num && clock < fewer[cut] && bound <= shortest * TIE) active.push(cut);
      fewer[cut] = Math.min(fewer[cut], clock);
    }
  }
  return ends;
}

// The shortest step of every number of slower messages up to one.
function slowEnds(row, most) {
  let free = new Array(row.num + 1).fill(Infinity);
  free[0] = 0;
  const ends = [];
  for (let number = 0; number < most; number++) {
    const active = free.flatMap((time, cut) => (cut < row.num && time < Infinity ? [cut] : []));
    free = oneMore(row, free, active, number, SLOWER);
    ends.push(free[row.num]);
  }
  return ends;
}

function oneMore(row, free, starts, number, slower) {
  const reached = new Array(row.num + 1).fill(Infinity);
  for (const start of starts) {
    const times = row.times[start];
    const lag = number * row.launch + row.taken[start];
    for (let end = start + 1; end <= row.num; end++) {
      const time = Math.max(free[start], row.ready[end] + lag) + slower * times[end];
      if (time < reached[end]) reached[end] = time;
    }
  }
  return reached;
}

// Messages that all leave room for those after them, if there are any: so many of them, or (null) the fewest.
function sizesWithin(row, deadline, slowDeadline, number) {
  let after = new Array(row.num + 1).fill(Infinity);
  after[row.num] = 0;
  const fewer = after.slice();
  const rounds = [];
  for (let active = [row.num]; active.length; ) {
    const lag = (number === null ? 0 : number - 1 - rounds.length) * row.launch;
    const reached = new Array(row.num + 1).fill(Infinity);
    const ends = new Array(row.num + 1).fill(0);
    for (const end of active) {
      for (let start = end - 1; start >= 0; start--) {
        const together = row.times[start][end] + after[end];
        const ready = row.ready[end] + lag + row.taken[start];
        if (together <= Math.min(deadline - ready, (slowDeadline - ready) / SLOWER) && together < reached[start]) {
          reached[start] = together;
          ends[start] = end;
        }
      }
    }
    rounds.push(ends);
    if (reached[0] < Infinity && (number === null || number === rounds.length)) return sizesOf(rounds);
    if (number === rounds.length) return null;
    active = [];
    for (let cut = 0; cut <= row.num; cut++) {
      if (reached[cut] < (number === null ? fewer[cut] : Infinity)) active.push(cut);
      fewer[cut] = Math.min(fewer[cut], reached[cut]);
    }
    after = reached;
  }
  return null;
}

function planPublished(model, cost) {
  const ready = readyTimes(model);
  const startup = messageTime(cost, 0);
  const sizes = [];
  let size = 1;
  let bytes = model.grad_bytes[0];
  let start = ready[0];
  for (let layer = 1; layer < ready.length; layer++) {
    if (ready[layer] - start < startup) {
      size++;
      bytes += model.grad_bytes[layer];
      start = Math.max(start, ready[layer]);
    } else {
      sizes.push(size);
      start = Math.max(start + messageTime(cost, bytes), ready[layer]);
      size = 1;
      bytes = model.grad_bytes[layer];
    }
  }
  sizes.push(size);
  return sizes;
}

function planBucket(model, cost, bucket) {
  const sizes = [];
  let limit = bucket.first_bytes;
  let held = 0;
  let heldBytes = 0;
  for (const bytes of model.grad_bytes) {
    held++;
    heldBytes += bytes;
    if (heldBytes >= limit) {
      sizes.push(held);
      held = 0;
      heldBytes = 0;
      limit = bucket.later_bytes;
    }
  }
  if (held) sizes.push(held);
  return sizes;
}

const PLANNERS = {
  wfbp: (model) => model.grad_bytes.map(() => 1),
  single: (model) => [model.grad_bytes.length],
  bucket: planBucket,
  mgwfbp: planPublished,
  optimal: planOptimal,
};

// ---- the recurrence: mgwfbp.timeline.predict

function predictStep(model, cost, sizes) {
  const alone = readyTimes(model);
  const ready = [];
  const begin = [];
  const messages = { ready: [], start: [], end: [], bytes: [], first: [], count: [] };
  let linkFree = 0;
  let first = 0;
  let lag = 0; // what messages so far have taken from the computation
  let taken = 0;
  for (const size of sizes) {
    let bytes = 0;
    for (let layer = first; layer < first + size; layer++) {
      bytes += model.grad_bytes[layer];
      begin.push((layer ? alone[layer - 1] : model.forward_s) + lag);
      ready.push(alone[layer] + lag);
      taken += begin[layer] - (layer ? ready[layer - 1] : model.forward_s);
    }
    const groupReady = ready[first + size - 1];
    const start = Math.max(linkFree, groupReady);
    linkFree = start + messageTime(cost, bytes);
    messages.ready.push(groupReady);
    messages.start.push(start);
    messages.end.push(linkFree);
    messages.bytes.push(bytes);
    messages.first.push(first);
    messages.count.push(size);
    first += size;
    lag += takenBy(cost, bytes);
  }
  const compute_s = ready[ready.length - 1];
  return { begin, ready, messages, ...judgeStep(cost, compute_s, Math.max(compute_s, linkFree), taken) };
}

// The same of a plan with gathers or with messages in low precision, {groups, gathers, sharded, wire}, whose groups are
// places of gradients; it is not planned here. A half of an all-reduce costs half of it, and takes all of a message's
// launch: mgwfbp.costs.sharded_cost.
function predictGiven(model, cost, low, plan) {
  const bytesOf = (group) => group.reduce((sum, layer) => sum + model.grad_bytes[layer], 0);
  const half = (bytes) => 0.5 * messageTime(cost, bytes);
  const halfTaken = (bytes) => takenBy({ taken_s: cost.taken_s, taken_per_byte_s: 0.5 * (cost.taken_per_byte_s || 0) }, bytes);
  const last = model.grad_bytes.length - 1;
  const arrived = [];
  const placeOf = new Map();
  const takes = new Map();
  plan.gathers.forEach((group, place) => {
    arrived.push((place ? arrived[place - 1] : 0) + half(bytesOf(group)));
    takes.set(place, halfTaken(bytesOf(group)));
    for (const layer of group) placeOf.set(layer, place);
  });
  if (placeOf.has(last)) takes.delete(0); // nothing is computed while the first gather is under way
  let now = plan.gathers.length ? 0 : model.forward_s;
  for (let layer = plan.gathers.length ? last : -1; layer >= 0; layer--) {
    const place = placeOf.get(layer) ?? -1;
    now = Math.max(now, place < 0 ? 0 : arrived[place]) + (takes.get(place + 1) ?? 0) + model.layer_forward_s[layer];
    takes.delete(place + 1);
  }
  const alone = readyTimes({ ...model, forward_s: now });
  const sent = []; // with which gradient each message is sent, and what those before it have taken
  let row = 0;
  let taken = 0;
  plan.groups.forEach((group, place) => {
    row = Math.max(row, ...group);
    sent.push([row, taken]);
    taken += plan.sharded[place] ? halfTaken(bytesOf(group)) : takenBy(plan.wire[place] ? low : cost, bytesOf(group));
  });
  const after = new Map(sent.slice(1).map(([, before], place) => [sent[place][0], before]));
  const lags = [0];
  for (let layer = 0; layer < last; layer++) lags.push(after.get(layer) ?? lags[layer]);
  const ready = alone.map((time, layer) => time + lags[layer]);
  let linkFree = 0;
  let end = 0;
  plan.groups.forEach((group, place) => {
    const [sentRow, before] = sent[place];
    const start = Math.max(linkFree, alone[sentRow] + before, ...group.map((layer) => ready[layer]));
    linkFree = start + (plan.sharded[place] ? half(bytesOf(group)) : messageTime(plan.wire[place] ? low : cost, bytesOf(group)));
    end = Math.max(end, linkFree);
  });
  const gaps = lags.map((lag, layer) => (layer ? alone[layer - 1] + lag - ready[layer - 1] : now + lag - now));
  const lost = gaps.reduce((sum, gap) => sum + gap, 0);
  const step = judgeStep(cost, ready[last], Math.max(ready[last], end), lost, Math.max(0, now - model.forward_s));
  const low_bytes = plan.groups.reduce((sum, group, place) => sum + (plan.wire[place] ? bytesOf(group) : 0), 0);
  return { messages: { start: plan.groups }, low_bytes, ...step };
}

function judgeStep(cost, compute_s, iteration_s, taken_s, waited_s = 0) {
  const exposed_s = iteration_s - compute_s + waited_s;
  const lost = exposed_s + taken_s;
  const alone_s = compute_s - taken_s - waited_s;
  const ratio = alone_s > 0 ? lost / alone_s : lost ? Infinity : 0;
  return { compute_s, iteration_s, exposed_s, speedup: cost.workers / (1 + ratio), efficiency: 1 / (1 + ratio) };
}

// The step of the best plan without the plan, which for a curve takes longer to find.
function bestStep(model, cost) {
  const takes = takesTime(model, cost);
  if (!cost.sizes && !takes) return predictStep(model, cost, planLine(model, cost));
  const ready = readyTimes(model);
  const end = takes
    ? Math.min(...shortestEnds(makeRow(model, cost), 1))
    : earliestEnds([0, ...ready], prefixBytes(model), cost, 1)[ready.length];
  return judgeStep(cost, ready[ready.length - 1], Math.max(ready[ready.length - 1], end), 0);
}
