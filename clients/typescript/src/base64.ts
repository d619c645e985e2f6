// Base64, in which JSON has bytes.

// `String.fromCharCode` takes its arguments from the stack. Divisible by 3: the pieces join without padding.
const PIECE_BYTES = 3 * 8192;

/** The bytes in base64. */
export function toBase64(bytes: Uint8Array): string {
  const pieces: string[] = [];
  for (let at = 0; at < bytes.length; at += PIECE_BYTES) {
    pieces.push(btoa(String.fromCharCode(...bytes.subarray(at, at + PIECE_BYTES))));
  }
  return pieces.join("");
}

/** The bytes of a text in base64. Throws for another text. */
export function bytesOfBase64(text: string): Uint8Array {
  return Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
}
