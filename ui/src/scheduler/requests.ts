// Unfinished requests, by program and tenant.

/** A request as `watched.requests` has it. */
export interface Request {
  readonly id: number;
  readonly tenant: string;
  readonly program: string;
  readonly status: "running" | "waiting";
  readonly prompt_tokens: number;
  readonly cached_tokens: number;
  readonly computed_tokens: number;
  readonly output_tokens: number;
  readonly age_s: number;
  /** Where it is, if its model has several. */
  readonly replica?: number | null;
}

export interface Group {
  readonly program: string;
  readonly tenant: string;
  readonly requests: readonly Request[];
  readonly running: number;
  readonly waiting: number;
  readonly promptTokens: number;
  readonly cachedTokens: number;
  readonly outputTokens: number;
  readonly oldestS: number;
}

/** The groups in the order of their names; in each the running requests first, then the oldest. */
export function grouped(requests: readonly Request[]): Group[] {
  const byName = new Map<string, Request[]>();
  for (const request of requests) {
    const name = JSON.stringify([request.program, request.tenant]);
    const list = byName.get(name);
    if (list === undefined) byName.set(name, [request]);
    else list.push(request);
  }
  return [...byName.values()]
    .map(groupOf)
    .sort((a, b) => compare(a.program, b.program) || compare(a.tenant, b.tenant));
}

function groupOf(requests: Request[]): Group {
  const sum = (of: (request: Request) => number): number =>
    requests.reduce((total, one) => total + of(one), 0);
  const [{ program, tenant }] = requests as [Request];
  const running = requests.filter(({ status }) => status === "running").length;
  const order = (request: Request): number => (request.status === "running" ? 0 : 1);
  return {
    program,
    tenant,
    requests: [...requests].sort((a, b) => order(a) - order(b) || b.age_s - a.age_s || a.id - b.id),
    running,
    waiting: requests.length - running,
    promptTokens: sum((one) => one.prompt_tokens),
    cachedTokens: sum((one) => one.cached_tokens),
    outputTokens: sum((one) => one.output_tokens),
    oldestS: Math.max(...requests.map((one) => one.age_s)),
  };
}

function compare(a: string, b: string): number {
  return a < b ? -1 : a > b ? 1 : 0;
}

/** The shares of a request's prompt that came from the cache and that were computed so far, 0 to 1 together. */
export function promptShares(request: Request): { cached: number; computed: number } {
  const { prompt_tokens: prompt, cached_tokens: cached, computed_tokens: computed } = request;
  if (prompt <= 0) return { cached: 0, computed: 0 };
  const shown = Math.min(cached / prompt, 1);
  return { cached: shown, computed: Math.min(Math.max(computed / prompt - shown, 0), 1 - shown) };
}
