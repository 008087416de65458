// Runs Perfetto's trace processor, as the web page of Perfetto has it, and passes bytes to and from it.
//
//     node trace_processor.mjs FOLDER
//
// FOLDER has engine_bundle.js and trace_processor.wasm. Standard input gets messages of Perfetto's RPC
// protocol, each after its length (4 bytes, little-endian); answers go to standard output as they come.

import {readFileSync, writeSync} from 'node:fs';
import {join} from 'node:path';

const folder = process.argv[2];

class LocalRequest {
  open(_method, url) { this.name = url; }
  send() { this.response = new Uint8Array(readFileSync(join(folder, this.name))).buffer; }
}

// The bundle is the script of a web worker.
const scope = {location: {href: 'file:///engine_bundle.js'}};
const quiet = {...console, log: console.error, warn: console.error, info: console.error};
const source = readFileSync(join(folder, 'engine_bundle.js'), 'utf8');
const names = ['self', 'WorkerGlobalScope', 'XMLHttpRequest', 'console', 'process', 'fetch', 'location'];
new Function(...names, source)(
    scope, Object, LocalRequest, quiet, undefined, undefined, scope.location);

function writeAll(bytes) {
  for (let done = 0; done < bytes.length;) {
    try {
      done += writeSync(1, bytes, done);
    } catch (error) {
      if (error.code !== 'EAGAIN') throw error;
    }
  }
}

const port = {postMessage: writeAll};
// Ready when the module has made its buffer, a moment after it was loaded.
setTimeout(() => {
  scope.onmessage({data: port});
  let pending = Buffer.alloc(0);
  process.stdin.on('data', (piece) => {
    pending = Buffer.concat([pending, piece]);
    while (pending.length >= 4 && pending.length >= 4 + pending.readUInt32LE(0)) {
      const end = 4 + pending.readUInt32LE(0);
      port.onmessage({data: new Uint8Array(pending.subarray(4, end))});
      pending = pending.subarray(end);
    }
  });
}, 500);
