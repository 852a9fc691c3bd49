//! Has the linker reserve room for an image, and name the build, since tools that cache symbols go by that name.

use std::env;

fn main() {
    println!("cargo:rerun-if-changed=reserve.ld");
    if env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        let folder = env::var("CARGO_MANIFEST_DIR").expect("cargo sets it for build scripts");
        println!("cargo:rustc-link-arg-bins=-T{folder}/reserve.ld");
        println!("cargo:rustc-link-arg-bins=-Wl,--build-id=sha1");
    }
}
