// The images that a session has on its server: each is sent once, before the first op that refers to it, and
// released when no part of the page uses it any more.

import { toBase64 } from "./base64.js";
import { knownFile, type Image } from "./image.js";
import type { Op, UploadOp } from "./protocol.js";

/** The most bytes of an image in one op, where frames have room for them. */
const UPLOAD_BYTES = 3_000_000;
/** An `upload` without its data, and its frame. */
const OVERHEAD_BYTES = 512;

/** The uploaded images of one session. */
export class Uploads {
  readonly #send: (op: Op) => void;
  readonly #sent = new Set<string>();
  readonly #unused = new Set<string>();
  readonly #users = new FinalizationRegistry<string>((source) => {
    this.#unused.add(source);
    this.#release();
  });

  /** `send` throws where the op cannot be sent. */
  constructor(send: (op: Op) => void) {
    this.#send = send;
  }

  /** Sends the images that the server does not have, in parts for frames of `frameBytes`. */
  send(images: Iterable<Image>, frameBytes: number): void {
    for (const image of images) {
      if (!image.data || this.#sent.has(image.source)) continue;
      for (const part of partsOf(image, image.data, frameBytes)) this.#send(part);
      this.#sent.add(image.source);
      this.#users.register(image, image.source);
    }
    this.#release();
  }

  #release(): void {
    for (const source of this.#unused) {
      const image = knownFile(source);
      if (image) this.#users.register(image, source); // it was loaded again meanwhile
      else {
        try {
          this.#send({ op: "release", source });
        } catch {
          return; // the session has ended
        }
        this.#sent.delete(source);
      }
      this.#unused.delete(source);
    }
  }
}

function* partsOf(image: Image, data: Uint8Array, frameBytes: number): Generator<UploadOp> {
  const room = Math.floor((frameBytes - OVERHEAD_BYTES) / 4) * 3;
  const step = Math.max(3, Math.min(UPLOAD_BYTES, room));
  for (let at = 0; at < data.length; at += step) {
    const part = toBase64(data.subarray(at, at + step));
    yield { op: "upload", source: image.source, size: data.length, at, data: part };
  }
}
