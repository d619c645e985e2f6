// SHA-256 (FIPS 180-4): by WebCrypto where there is one. Browsers have none on pages of insecure origins, such as
// http:// of another machine.

const BLOCK_BYTES = 64;
// The page stays responsive between slices.
const SLICE_BYTES = BLOCK_BYTES * 16_384;

/** The digest of the bytes, in hexadecimal digits. */
export async function sha256(data: Uint8Array): Promise<string> {
  const { subtle } = (globalThis.crypto as Partial<Crypto> | undefined) ?? {};
  if (!subtle) return plainSha256(data);
  return hex(new Uint8Array(await subtle.digest("SHA-256", data as Uint8Array<ArrayBuffer>)));
}

/** @internal The same without WebCrypto. */
export async function plainSha256(data: Uint8Array): Promise<string> {
  const state = Uint32Array.from(INITIAL);
  const numWhole = data.length - (data.length % BLOCK_BYTES);
  for (let at = 0; at < numWhole; at += BLOCK_BYTES) {
    if (at && at % SLICE_BYTES === 0) await new Promise((resolve) => setTimeout(resolve));
    compress(state, data, at);
  }
  // The rest, a one bit, and the length in bits as the last 8 bytes.
  const rest = data.length - numWhole;
  const last = new Uint8Array(rest + 9 > BLOCK_BYTES ? 2 * BLOCK_BYTES : BLOCK_BYTES);
  last.set(data.subarray(numWhole));
  last[rest] = 0x80;
  const view = new DataView(last.buffer);
  view.setUint32(last.length - 8, Math.floor(data.length / 2 ** 29));
  view.setUint32(last.length - 4, (data.length * 8) >>> 0);
  for (let at = 0; at < last.length; at += BLOCK_BYTES) compress(state, last, at);
  const digest = new DataView(new ArrayBuffer(32));
  state.forEach((word, index) => digest.setUint32(4 * index, word));
  return hex(new Uint8Array(digest.buffer));
}

function hex(bytes: Uint8Array): string {
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** The first 32 bits of the fractional parts of roots of the first primes. */
function fractions(count: number, root: (prime: number) => number): number[] {
  const found: number[] = [];
  for (let candidate = 2; found.length < count; candidate++) {
    let divisor = 2;
    while (candidate % divisor) divisor++;
    if (divisor === candidate) found.push(Math.floor((root(candidate) % 1) * 2 ** 32));
  }
  return found;
}

const INITIAL = fractions(8, Math.sqrt);
const ROUNDS = Uint32Array.from(fractions(64, Math.cbrt));
const schedule = new Uint32Array(64);

const rotated = (word: number, by: number): number => (word >>> by) | (word << (32 - by));

/** Takes one block into the state. */
function compress(state: Uint32Array, data: Uint8Array, start: number): void {
  const w = schedule;
  for (let t = 0; t < 16; t++) {
    const at = start + 4 * t;
    w[t] = (data[at]! << 24) | (data[at + 1]! << 16) | (data[at + 2]! << 8) | data[at + 3]!;
  }
  for (let t = 16; t < 64; t++) {
    const [early, late] = [w[t - 15]!, w[t - 2]!];
    const s0 = rotated(early, 7) ^ rotated(early, 18) ^ (early >>> 3);
    const s1 = rotated(late, 17) ^ rotated(late, 19) ^ (late >>> 10);
    w[t] = w[t - 16]! + s0 + w[t - 7]! + s1;
  }
  let [a, b, c, d] = [state[0]!, state[1]!, state[2]!, state[3]!];
  let [e, f, g, h] = [state[4]!, state[5]!, state[6]!, state[7]!];
  for (let t = 0; t < 64; t++) {
    const s1 = rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25);
    const first = (h + s1 + ((e & f) ^ (~e & g)) + ROUNDS[t]! + w[t]!) | 0;
    const s0 = rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22);
    const second = (s0 + ((a & b) ^ (a & c) ^ (b & c))) | 0;
    h = g;
    g = f;
    f = e;
    e = (d + first) | 0;
    d = c;
    c = b;
    b = a;
    a = (first + second) | 0;
  }
  [a, b, c, d, e, f, g, h].forEach((word, index) => (state[index]! += word));
}
