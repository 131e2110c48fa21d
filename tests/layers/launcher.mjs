// A launcher of layers, written from docs/layer-record.md and docs/launch-record.md alone. It reads
// {layer, records, calls} on stdin, and writes the launches of each call, or why it is refused. Windows it does not know.
import { readFileSync } from "node:fs";

const { layer, records, calls } = JSON.parse(readFileSync(0, "utf8"));
const BYTES = { bf16: 2n, fp16: 2n, f32: 4n, f64: 8n, i32: 4n, i64: 8n, u8: 1n, u16: 2n, u32: 4n, u64: 8n, e4m3: 1n, e5m2: 1n, e8m0: 1n, e2m1x2: 1n };
const WIDTH = { i8: 1, i16: 2, i32: 4, i64: 8, u8: 1, u16: 2, u32: 4, u64: 8 };
const max = (items) => items.reduce((a, b) => (a > b ? a : b));
const min = (items) => items.reduce((a, b) => (a < b ? a : b));
const product = (items) => items.reduce((a, b) => a * b, 1n);
const floordiv = (a, b) => { if (b <= 0n) throw Error("divisor"); return a >= 0n ? a / b : -((-a + b - 1n) / b); };
const rowMajor = (shape) => shape.map((_, index) => product(shape.slice(index + 1).map((extent) => extent || 1n)));
const padded = (size) => ((size + 255n) / 256n) * 256n;
const OPERATORS = {
  add: (v) => v.reduce((a, b) => a + b), mul: product, sub: ([a, b]) => a - b, floordiv: ([a, b]) => floordiv(a, b),
  ceildiv: ([a, b]) => -floordiv(-a, b), mod: ([a, b]) => a - b * floordiv(a, b), min, max,
  eq: ([a, b]) => BigInt(a === b), ne: ([a, b]) => BigInt(a !== b), lt: ([a, b]) => BigInt(a < b), le: ([a, b]) => BigInt(a <= b),
  bit_length: ([a]) => BigInt(a === 0n ? 0 : a.toString(2).length), exp2: ([a]) => 1n << a,
};

function evaluate(expr, env) {
  if (typeof expr === "number") return BigInt(expr);
  if (typeof expr === "string") { if (!(expr in env)) throw Error(`${expr} has no value`); return env[expr]; }
  const [operator, ...operands] = expr;
  if (operator === "if") return evaluate(operands[evaluate(operands[0], env) ? 1 : 2], env);
  return OPERATORS[operator](operands.map((operand) => evaluate(operand, env)));
}

// -- the layer

const buffers = Object.fromEntries(layer.buffers.map((buffer) => [buffer.name, buffer]));
const extents = (name, env) => buffers[name].shape.map((extent) => evaluate(extent, env));
const bytes = (name, env) => product(extents(name, env).map((extent) => extent || 1n)) * BYTES[buffers[name].dtype];

function keptPlaces(env) {
  const places = {};
  let end = 0n;
  for (const { name, place } of layer.buffers)
    if (place === "kept") { places[name] = end; end += padded(bytes(name, env)); }
  return [places, end];
}

function chosen(pass, steps, call, env, kept) {
  const asked = new Set(call.outputs), spared = pass.steps.map((step) => step.unless).filter(Boolean);
  const used = new Set(steps.flatMap((step) => Object.values(step.arguments)));
  const range = env[layer.range_of];
  const contiguous = (name) => rowMajor(extents(name, env)).every((stride, index) =>
    extents(name, env)[index] <= 1n || BigInt(call.strides[name][index]) === stride);
  let best = null;
  for (const layout of pass.layouts) {
    if (layout.in_place !== call.in_place || ![...asked].every((name) => layout.outputs.includes(name))) continue;
    if (layout.outputs.some((name) => !asked.has(name) && spared.includes(name))) continue;
    if (!layout.lends.every((name) => asked.has(name) && contiguous(name))) continue;
    if (range < BigInt(layout.since) || ("until" in layout && range > BigInt(layout.until))) continue;
    const ends = {}, homes = {}, places = {};
    for (const { buffer, home, above } of layout.places) {
      const begin = above.length ? max(above.map((name) => ends[name])) : 0n;
      const end = begin + (used.has(buffer) && !asked.has(buffer) ? bytes(buffer, env) : 0n);
      places[buffer] = home in kept ? ["kept", kept[home] + begin] : [home, begin];
      homes[home] = max([homes[home] ?? 0n, end]);
      ends[buffer] = padded(end);
    }
    const room = (home) => home in kept ? padded(bytes(home, env)) : extents(home, env).includes(0n) ? 0n : bytes(home, env);
    if (!Object.entries(homes).every(([home, end]) => home === "scratch" || end <= room(home))) continue;
    const scratch = homes.scratch ?? 0n;
    if (best === null || scratch < best.scratch) best = { scratch, places };
  }
  return best;
}

function passOf(call) {
  const env = { T: BigInt(call.tokens) }, pass = layer.passes[call.pass], asked = new Set(call.outputs);
  for (const { name, value } of layer.dims) env[name] = evaluate(value, env);
  const order = call.in_place && pass.in_place ? pass.in_place.map((index) => pass.steps[index]) : pass.steps;
  const steps = order.filter((step) => (!step.outputs || step.outputs.some((name) => asked.has(name)))
    && (!step.needs || asked.has(step.needs)) && !(step.unless && asked.has(step.unless)));
  const [kept] = keptPlaces(env), layout = chosen(pass, steps, call, env, kept);
  const address = (name) => {
    if (asked.has(name) || pass.inputs.includes(name)) return BigInt(call.addresses[name]);
    const [home, begin] = layout.places[name] ?? ["kept", kept[name]];
    return BigInt(call.addresses[home]) + begin;
  };
  return steps.flatMap((step) => {
    const { key } = layer.parts[step.part].find((rung) => !("tokens" in rung) || call.tokens <= rung.tokens);
    if (key === undefined) return []; // nothing is launched for so many tokens
    const tensors = Object.entries(step.arguments).map(([argument, name]) => [argument,
      { address: address(name), shape: extents(name, env), strides: call.strides[name]?.map(BigInt) }]);
    return launches(records[key], layer.kernels[key].defaults, Object.fromEntries(tensors), call, key);
  });
}

// -- a kernel

function launches(record, defaults, tensors, call, key) {
  const env = { sm_count: BigInt(call.sm_count), cluster_margin: BigInt(call.cluster_margin ?? defaults.cluster_margin ?? 0) };
  for (const argument of record.arguments.filter((each) => each.kind === "tensor")) {
    const tensor = tensors[argument.name], { shape } = tensor;
    const compact = rowMajor(shape);
    const given = shape.includes(0n) || !tensor.strides ? compact : tensor.strides;
    shape.forEach((extent, index) => {
      env[`${argument.name}.stride${index}`] = extent === 1n ? compact[index] : given[index];
      if (typeof argument.shape[index] === "string") env[argument.shape[index]] ??= extent;
    });
    env[`${argument.name}.address`] = tensor.address;
  }
  if (record.skip_if_zero.some((name) => env[name] === 0n)) return [];
  for (const { name, value } of record.values ?? []) env[name] = evaluate(value, env);
  for (const { expr, message } of record.constraints) if (evaluate(expr, env)) throw Error(message);
  return [record, ...(record.then ?? [])].map((step) => ({
    key, symbol: step.symbol, grid: step.grid.map((expr) => Number(evaluate(expr, env))), block: step.block,
    cluster: step.cluster, shared: step.dynamic_shared, stream: call.stream,
    parameters: [...step.parameters].sort((a, b) => a.offset - b.offset).map((each) => parameter(each, env, record, defaults)),
  }));
}

function parameter(each, env, record, defaults) {
  const numbers = (exprs) => exprs.map((expr) => Number(evaluate(expr, env)));
  if (each.kind === "tensor_map")
    return { address: `${BigInt.asUintN(64, evaluate(each.address, env))}`, dims: numbers(each.dims), strides: numbers(each.strides) };
  const data = Buffer.alloc(each.size);
  for (const field of each.kind === "struct" ? each.fields : [each]) write(data, each.kind === "struct" ? field.offset : 0, field, env, record, defaults);
  return { bytes: data.toString("hex") };
}

function write(data, at, field, env, record, defaults) {
  if (field.kind === "pointer") {
    if (["workspace", "scratch"].includes(field.argument)) return; // memory of the stream: the test does not compare it
    data.writeBigUInt64LE(BigInt.asUintN(64, env[`${field.argument}.address`] + evaluate(field.shift ?? 0, env)), at);
  } else if (field.kind === "integer") {
    let value = BigInt.asUintN(8 * WIDTH[field.dtype], evaluate(field.value, env));
    for (let index = 0; index < WIDTH[field.dtype]; index++, value >>= 8n) data[at + index] = Number(value & 255n);
  } else {
    const { default: own } = record.arguments.find((argument) => argument.name === field.argument);
    const value = defaults[field.argument] ?? own;
    data.writeFloatLE(typeof value === "string" ? { inf: Infinity, "-inf": -Infinity, nan: NaN }[value] : value, at);
  }
}

process.stdout.write(JSON.stringify(calls.map((call) => passOf(call))));
