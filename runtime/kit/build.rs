//! Has the linker reserve room for an image, and name the build, since tools that cache symbols go by that name.

use std::env;

fn main() {
    println!("cargo:rerun-if-changed=reserve.ld");
    if env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        let folder = env::var("CARGO_MANIFEST_DIR").expect("cargo sets it for build scripts");
        for kind in ["bins", "cdylib"] {
            println!("cargo:rustc-link-arg-{kind}=-T{folder}/reserve.ld");
            println!("cargo:rustc-link-arg-{kind}=-Wl,--build-id=sha1");
        }
        // One table of exported names, which a compiler writes anew.
        println!("cargo:rustc-link-arg-cdylib=-Wl,--hash-style=gnu");
    }
}
