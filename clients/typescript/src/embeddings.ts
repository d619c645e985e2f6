// Embeddings of many texts: in ops of bounded size, of which some run at once, each in a branch of one state.
// Closing a branch frees its embeddings on the server.

import { countCodePoints } from "./code_points.js";
import { BadArgument, NotSupported, ServerError, UnknownModel } from "./errors.js";
import type { Capabilities, EmbedOp } from "./protocol.js";
import type { State } from "./state.js";

/** Options of `session.embed`. */
export interface EmbedOptions {
  /** One of `session.capabilities.embedding_models`; by default the first. */
  model?: string | undefined;
  /** Only so many dimensions, the first ones, for models that are trained for it. */
  dimensions?: number | undefined;
  /** Put before each text. */
  prompt?: string | undefined;
  /** The model's own prompt of this name instead, such as `query`. */
  promptName?: string | undefined;
  /** Aborts the call: all of its ops are cancelled. */
  signal?: AbortSignal | undefined;
}

/** The fields of an op that say how to embed. */
export type EmbedFields = Omit<EmbedOp, "op" | "state" | "var" | "name" | "texts">;

// The limits of one op.
const MAX_TEXTS = 256;
const MAX_CODE_POINTS = 200_000;
// Ops that run at once: the engine then has work between two of them.
const CONCURRENCY = 4;

/** The fields of ops with these options, which are checked as far as the client can. */
export function embedFields(capabilities: Capabilities, options: EmbedOptions): EmbedFields {
  const { embedding_models: models, model: own } = capabilities;
  const { model, dimensions, prompt, promptName } = options;
  if (!models.length) throw new NotSupported(`${own} makes no embeddings: serve a model that does beside it`);
  if (model !== undefined && !models.includes(model)) {
    const known = models.join(", ");
    throw new UnknownModel(`no model ${JSON.stringify(model)} makes embeddings here (there are: ${known})`, {
      param: "model",
    });
  }
  if (prompt !== undefined && promptName !== undefined) {
    throw new BadArgument("embed: give either prompt or promptName", { param: "promptName" });
  }
  const fields: EmbedFields = {};
  if (model !== undefined) fields.model = model;
  if (dimensions !== undefined) fields.dimensions = dimensions;
  if (prompt !== undefined) fields.prompt = prompt;
  if (promptName !== undefined) fields.prompt_name = promptName;
  return fields;
}

/** The embeddings of the texts, in their order. A failure cancels all other ops. */
export async function embedTexts(
  open: () => State,
  texts: readonly string[],
  fields: EmbedFields,
  signal?: AbortSignal,
): Promise<Float32Array[]> {
  const parts = batches(texts, countCodePoints(fields.prompt ?? ""));
  signal?.throwIfAborted();
  if (!parts.length) return [];
  const root = open();
  const found: Float32Array[][] = [];
  let next = 0;
  const work = async (): Promise<void> => {
    while (next < parts.length) {
      const index = next++;
      const [branch] = root.fork(1) as [State];
      try {
        found[index] = vectorsOf(await branch.embed("embed", parts[index]!, fields));
      } finally {
        branch.close();
      }
    }
  };
  const abort = (): void => root.cancel();
  signal?.addEventListener("abort", abort, { once: true });
  try {
    await Promise.all(Array.from({ length: Math.min(CONCURRENCY, parts.length) }, work));
  } catch (error) {
    next = parts.length;
    root.cancel(signal?.aborted ? {} : { failure: error });
    throw signal?.aborted ? signal.reason : error;
  } finally {
    signal?.removeEventListener("abort", abort);
    root.close();
  }
  return found.flat();
}

/** Texts for one op each, as many as it may have. */
function batches(texts: readonly string[], promptSize: number): string[][] {
  const made: string[][] = [];
  let size = Infinity;
  texts.forEach((text, index) => {
    if (typeof text !== "string" || !text) {
      const wrong = text === "" ? "is empty: leave it out" : "is not a string (await a variable first)";
      throw new BadArgument(`embed: text ${index} ${wrong}`, { param: "texts" });
    }
    const more = countCodePoints(text) + promptSize;
    const last = made.at(-1);
    if (last && last.length < MAX_TEXTS && size + more <= MAX_CODE_POINTS) {
      last.push(text);
      size += more;
    } else {
      made.push([text]);
      size = more;
    }
  });
  return made;
}

/** Of a JSON list of the float32 values in base64, little-endian. */
function vectorsOf(text: string): Float32Array[] {
  return (JSON.parse(text) as string[]).map((encoded) => {
    const bytes = Uint8Array.from(atob(encoded), (char) => char.charCodeAt(0));
    if (bytes.length % 4) throw new ServerError(`an embedding has ${bytes.length} bytes`);
    const view = new DataView(bytes.buffer);
    return Float32Array.from({ length: bytes.length / 4 }, (_, index) => view.getFloat32(4 * index, true));
  });
}
