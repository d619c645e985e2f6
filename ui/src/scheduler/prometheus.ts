// Reads Prometheus' text format, as `GET /metrics` answers.
//
// A scrape is a list of samples. Histograms stay as their `_bucket`, `_sum` and `_count` samples, from which
// `histogram` makes one cumulative histogram. Lines that cannot be read are skipped: one odd line must not
// hide the others.

export interface Sample {
  readonly name: string;
  readonly labels: Readonly<Record<string, string>>;
  readonly value: number;
}

/** A cumulative histogram. `bounds`: upper bounds in ascending order, the last one `Infinity`. `counts`: the
 * number of observations at most as large as each bound. */
export interface Histogram {
  readonly bounds: readonly number[];
  readonly counts: readonly number[];
  readonly sum: number;
}

/** What a selector matches: each label must have the given value, or, for a function, satisfy it. */
export type Labels = Readonly<Record<string, string | ((value: string) => boolean)>>;

/** The samples of one scrape, by name. */
export class Scrape {
  private readonly byName = new Map<string, Sample[]>();

  /** `atS`: when the scrape was received, in seconds of any clock that rates are to use. */
  constructor(
    samples: Iterable<Sample>,
    readonly atS = 0,
  ) {
    for (const sample of samples) {
      const list = this.byName.get(sample.name);
      if (list === undefined) this.byName.set(sample.name, [sample]);
      else list.push(sample);
    }
  }

  /** The samples with this name and these labels. */
  select(name: string, labels: Labels = {}): Sample[] {
    return (this.byName.get(name) ?? []).filter((sample) => matches(sample, labels));
  }

  /** The sum of the samples; null if there is none. */
  sum(name: string, labels: Labels = {}): number | null {
    const found = this.select(name, labels);
    return found.length === 0 ? null : found.reduce((sum, sample) => sum + sample.value, 0);
  }

  /** The values of a label, in the order of the samples. */
  values(name: string, label: string): string[] {
    const found = this.select(name).map((sample) => sample.labels[label] ?? "");
    return [...new Set(found)];
  }

  /** The histogram `name`, summed over all that match; null if there is none. */
  histogram(name: string, labels: Labels = {}): Histogram | null {
    const buckets = new Map<number, number>();
    for (const sample of this.select(`${name}_bucket`, labels)) {
      const bound = parseValue(sample.labels["le"] ?? "");
      if (bound !== null) buckets.set(bound, (buckets.get(bound) ?? 0) + sample.value);
    }
    if (buckets.size === 0) return null;
    const bounds = [...buckets.keys()].sort((a, b) => a - b);
    return {
      bounds,
      counts: bounds.map((bound) => buckets.get(bound) ?? 0),
      sum: this.sum(`${name}_sum`, labels) ?? 0,
    };
  }
}

function matches(sample: Sample, labels: Labels): boolean {
  for (const [label, wanted] of Object.entries(labels)) {
    const value = sample.labels[label] ?? "";
    if (typeof wanted === "string" ? value !== wanted : !wanted(value)) return false;
  }
  return true;
}

/** The number of observations. */
export function observations(histogram: Histogram | null): number {
  return histogram?.counts[histogram.counts.length - 1] ?? 0;
}

/** `now` without the observations in `before`. Where a count is smaller than before, the server began anew:
 * then all of `now` is new. */
export function since(now: Histogram | null, before: Histogram | null): Histogram | null {
  if (now === null || before === null || before.counts.length !== now.counts.length) return now;
  const counts = now.counts.map((value, i) => value - (before.counts[i] ?? 0));
  if (counts.some((value) => value < 0)) return now;
  return { bounds: now.bounds, counts, sum: now.sum - before.sum };
}

/** The quantile `q` (0 to 1) as Prometheus' `histogram_quantile` computes it: linear within the bucket, from
 * 0 in the first one; in the last one its lower bound. Null without observations. */
export function quantile(histogram: Histogram | null, q: number): number | null {
  if (histogram === null) return null;
  const { bounds, counts } = histogram;
  const total = observations(histogram);
  if (!(total > 0)) return null;
  const rank = q * total;
  const index = counts.findIndex((value) => value >= rank);
  const upper = bounds[index] ?? Infinity;
  const lower = index === 0 ? 0 : (bounds[index - 1] ?? 0);
  if (upper === Infinity) return index === 0 ? null : lower;
  const below = index === 0 ? 0 : (counts[index - 1] ?? 0);
  const inside = (counts[index] ?? 0) - below;
  return inside === 0 ? upper : lower + (upper - lower) * ((rank - below) / inside);
}

/** Reads a scrape. */
export function parseScrape(text: string, atS = 0): Scrape {
  const samples: Sample[] = [];
  for (const line of text.split("\n")) {
    const sample = parseLine(line);
    if (sample !== null) samples.push(sample);
  }
  return new Scrape(samples, atS);
}

const NAME = /[a-zA-Z_:][a-zA-Z0-9_:]*/y;
const LABEL = /\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(,?)/y;

function parseLine(raw: string): Sample | null {
  const line = raw.trim();
  if (line === "" || line.startsWith("#")) return null;
  NAME.lastIndex = 0;
  const name = NAME.exec(line)?.[0];
  if (name === undefined) return null;
  let at = NAME.lastIndex;
  const labels: Record<string, string> = {};
  if (line[at] === "{") {
    at += 1;
    for (;;) {
      LABEL.lastIndex = at;
      const label = LABEL.exec(line);
      if (label === null) break;
      labels[label[1] as string] = unescaped(label[2] as string);
      at = LABEL.lastIndex;
      if (label[3] === "") break;
    }
    while (line[at] === " ") at += 1;
    if (line[at] !== "}") return null;
    at += 1;
  }
  const [word] = line.slice(at).trim().split(/\s+/, 1);
  const value = parseValue(word ?? "");
  return value === null ? null : { name, labels, value };
}

function unescaped(text: string): string {
  return text.replace(/\\(.)/g, (_, char: string) => (char === "n" ? "\n" : char));
}

function parseValue(word: string): number | null {
  if (word === "+Inf" || word === "Inf") return Infinity;
  if (word === "-Inf") return -Infinity;
  if (word === "NaN") return NaN;
  if (word === "") return null;
  const value = Number(word);
  return Number.isNaN(value) ? null : value;
}
