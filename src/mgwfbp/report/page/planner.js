// The planners of mgwfbp for a straight-line cost, operation by operation as in Python, so that every number is the same.
//
// A model is {forward_s, backward_s: [...], grad_bytes: [...]} in ready order; a cost is {workers, startup_s, per_byte_s}.

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

const messageTime = (cost, bytes) => cost.startup_s + cost.per_byte_s * bytes;

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

function planOptimal(model, cost) {
  const ready = readyTimes(model);
  const prefix = prefixBytes(model);
  const { startup_s, per_byte_s } = cost;
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
  // Of all plans that end as early the one with the fewest messages: backwards, each takes in all it can.
  const cuts = [ready.length];
  let deadline = earliest[earliest.length - 1] * (1 + 1e-12);
  while (cuts[cuts.length - 1] > 0) {
    const last = cuts[cuts.length - 1];
    const now = ready[last - 1];
    const endBytes = prefix[last];
    let start = last - 1;
    while (start > 0 && now + (startup_s + per_byte_s * (endBytes - prefix[start - 1])) <= deadline) start--;
    deadline -= startup_s + per_byte_s * (endBytes - prefix[start]);
    deadline = Math.max(deadline, earliest[start]);
    cuts.push(start);
  }
  cuts.reverse();
  return cuts.slice(1).map((end, index) => end - cuts[index]);
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
  const ready = readyTimes(model);
  const messages = { ready: [], start: [], end: [], bytes: [], first: [], count: [] };
  let linkFree = 0;
  let taken = 0;
  for (const size of sizes) {
    let bytes = 0;
    for (let layer = taken; layer < taken + size; layer++) bytes += model.grad_bytes[layer];
    const groupReady = ready[taken + size - 1];
    const start = Math.max(linkFree, groupReady);
    linkFree = start + messageTime(cost, bytes);
    messages.ready.push(groupReady);
    messages.start.push(start);
    messages.end.push(linkFree);
    messages.bytes.push(bytes);
    messages.first.push(taken);
    messages.count.push(size);
    taken += size;
  }
  const compute_s = ready[ready.length - 1];
  const iteration_s = Math.max(compute_s, linkFree);
  const exposed_s = iteration_s - compute_s;
  const ratio = compute_s ? exposed_s / compute_s : exposed_s ? Infinity : 0;
  return {
    ready,
    messages,
    compute_s,
    iteration_s,
    exposed_s,
    speedup: cost.workers / (1 + ratio),
    efficiency: 1 / (1 + ratio),
  };
}
