"""Write small models whose extents depend on sizes of inputs or on data, with onnxruntime's results.

usage: export_extents.py OUTDIR
needs: pip install onnx onnxruntime

OUTDIR/NAME/model.onnx comes with test_data_set_N/{input,output}_i.pb (ONNX backend-test layout), one set for each size.
"""
import os, shutil, sys
import numpy as np, onnx, onnx.parser, onnxruntime
from onnx import numpy_helper

RNG = np.random.default_rng(0)
HEADER = '<ir_version: 9, opset_import: ["" : 18]> '
GROW = '<body: graph = b (int64 i, bool c, float[P,3] s) => (bool d, float[Q,3] r) { d=Identity(c) r=Concat<axis=0>(s,v) }>'


def reals(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def ints(*values):
    return np.array(values, np.int64)


def bools(*values):
    return np.array(values, bool)


def of_shapes(*shapes):
    return [dict(x=reals(*shape)) for shape in shapes]


# Name, model, and the inputs of each run.
MODELS = [
    ("slice_beyond_the_end", """g (float[N] x) => (int64[1] s, int64[1,K] nz) <int64[1] z={0}, int64[1] five={5}>
        { y=Slice(x,z,five) s=Shape(y) nz=NonZero(x) }""", of_shapes((3,), (5,), (9,), (0,))),
    ("first_hundred_boxes", """g (float[N,4] boxes, float[N] sc) => (float[K,4] y)
        <int64[1] z={0}, int64[1] hundred={100}, int64[1] a0={0}, float th={0.5}>
        { b=Slice(boxes,z,hundred,a0) s=Slice(sc,z,hundred,a0) m=Greater(s,th) y=Compress<axis=0>(b,m) }""",
     [dict(boxes=reals(n, 4), sc=reals(n)) for n in (30, 100, 170, 1)]),
    ("last_three", """g (float[N] x) => (float[A] y, int64[1,K] nz) <int64[1] from={-3}, int64[1] to={9223372036854775807}>
        { y=Slice(x,from,to) nz=NonZero(x) }""", of_shapes((2,), (3,), (8,))),
    ("every_second_backwards", """g (float[N] x) => (float[A] y, int64[1,K] nz)
        <int64[1] z={-1}, int64[1] e={-100}, int64[1] a={0}, int64[1] st={-2}> { y=Slice(x,z,e,a,st) nz=NonZero(x) }""",
     of_shapes((6,), (1,), (7,))),
    ("second_half", """g (float[N,M] x) => (float[K,M] y) <int64[1] z={0}, int64[1] two={2}>
        { s=Shape<start=0,end=1>(x) h=Div(s,two) y=Slice(x,h,s,z) }""", of_shapes((5, 3), (4, 3), (1, 2))),
    ("squeeze_of_single_axes", "g (float[N,M] x) => (float[A] y) { y=Squeeze(x) }", of_shapes((1, 7), (7, 1))),
    ("number_of_non_zeros", "g (float[N] x) => (int64[R] s) { c=NonZero(x) s=Shape(c) }", of_shapes((4,), (9,))),
    ("size_of_a_selection", "g (float[N,3] x, bool[N] m) => (int64 s) { c=Compress<axis=0>(x,m) s=Size(c) }",
     [dict(x=reals(4, 3), m=bools(1, 0, 1, 1)), dict(x=reals(2, 3), m=bools(0, 0))]),
    ("number_of_unique_elements", "g (int64[N] x) => (int64[R] s) { c=Unique(x) s=Shape(c) }",
     [dict(x=ints(1, 2, 1, 3)), dict(x=ints(5, 5))]),
    ("branch_on_a_count", """g (float[N] x) => (float y) <int64 zero={0}> { c=NonZero(x) n=Size(c) e=Equal(n,zero)
        y=If(e)<then_branch: graph=t () => (float a) <float a={1}> {}, else_branch: graph=u () => (float b) <float b={2}> {}> }""",
     [dict(x=reals(4)), dict(x=np.zeros(3, np.float32))]),
    ("rows_of_a_loop", """g (float[N,3] x, int64 n) => (int64[R] s) { c0=Cast<to=9>(n)
        v,w=Loop(n,c0,x)<body: graph=b (int64 i, bool c, float[N,3] a) => (bool d, float[N,3] r, float[N,3] o)
        { d=Identity(c) r=Neg(a) o=Abs(a) }> s=Shape(w) }""", [dict(x=reals(4, 3), n=np.array(3))]),
    ("add_weights_of_a_size", """g (float[N,3] x) => (float[A,3] y, int64[2,K] nz) <float[4,3] w={1,1,1,1,1,1,1,1,1,1,1,1}>
        { y=Add(x,w) nz=NonZero(x) }""", of_shapes((4, 3), (1, 3))),
    ("convolution_of_the_same_size", """g (float[1,1,N,M] x) => (float[1,1,A,B] y, int64[4,K] nz)
        <float[1,1,3,3] w={1,1,1,1,1,1,1,1,1}> { y=Conv<auto_pad="SAME_UPPER",strides=[2,2]>(x,w) nz=NonZero(x) }""",
     of_shapes((1, 1, 7, 6), (1, 1, 4, 9))),
    ("two_parts", """g (float[N,3] x) => (float[A,3] a, float[B,3] b, int64[2,K] nz)
        { a,b=Split<num_outputs=2,axis=0>(x) nz=NonZero(x) }""", of_shapes((5, 3), (4, 3))),
    ("expand_to_a_size", """g (float[N,3] x) => (float[A,3] y, int64[2,K] nz) <int64[2] s={4,3}>
        { y=Expand(x,s) nz=NonZero(x) }""", of_shapes((4, 3), (1, 3))),
    ("pairs", """g (float[N,4] x) => (float[A,2] y, int64[2,K] nz) <int64[2] s={-1,2}> { y=Reshape(x,s) nz=NonZero(x) }""",
     of_shapes((4, 4), (3, 4))),
    ("triples", "g (float[N,4] x) => (float[A,3] y) <int64[2] s={-1,3}> { y=Reshape(x,s) }", of_shapes((6, 4), (3, 4))),
    ("depth_to_space", "g (float[1,C,N,M] x) => (float[1,A,B,D] y, int64[4,K] nz) { y=DepthToSpace<blocksize=2>(x) nz=NonZero(x) }",
     of_shapes((1, 8, 2, 3), (1, 4, 1, 5))),
    ("crop_and_pad", """g (float[N,M] x) => (float[A,B] y, int64[2,K] nz) <int64[2] s={3,4}>
        { y=CenterCropPad(x,s) nz=NonZero(x) }""", of_shapes((5, 3), (2, 9), (4, 4))),
    ("crop_and_pad_to_operands", "g (float[N,3] x, int64[2] sz) => (float[A,B] y) { y=CenterCropPad(x,sz) }",
     [dict(x=reals(7, 3), sz=ints(3, 4)), dict(x=reals(2, 3), sz=ints(5, 1))]),
    ("product_of_unlike_dims", "g (float[N,M] x, float[P,Q] z) => (float[N,Q] y, int64[2,K] nz) { y=MatMul(x,z) nz=NonZero(x) }",
     [dict(x=reals(5, 3), z=reals(3, 2)), dict(x=reals(1, 4), z=reals(4, 4))]),
    ("loop_that_adds_selected_rows", """g (float[N,3] x, bool[N] m, int64 n) => (float[K,3] y) { v=Compress<axis=0>(x,m)
        y=Loop(n,"",v)""" + GROW + " }",
     [dict(x=reals(4, 3), m=bools(1, 0, 1, 1), n=np.array(3)), dict(x=reals(2, 3), m=bools(0, 1), n=np.array(0))]),
    ("loop_of_as_many_steps_as_rows", """g (float[N,3] x) => (float[K,3] y) <float z={0}, int64[1] o={1}>
        { q=ReduceSum<keepdims=0>(x,o) m=Greater(q,z) v=Compress<axis=0>(x,m) sh=Shape<start=0,end=1>(v) k=Squeeze(sh)
        y=Loop(k,"",v)""" + GROW + " }", of_shapes((4, 3), (7, 3))),
    ("pads_of_both_signs", "g (float[N,4] x, int64[4] p) => (float[A,B] y) { y=Pad(x,p) }",
     [dict(x=reals(6, 4), p=ints(-1, 2, 0, -1)), dict(x=reals(3, 4), p=ints(1, 0, -2, 1))]),
    ("part_of_a_sequence", """g (float[N,3] x, int64[2] sz) => (float[A,3] y) <int64 one={1}>
        { s=SplitToSequence<axis=0>(x,sz) y=SequenceAt(s,one) }""",
     [dict(x=reals(7, 3), sz=ints(3, 4)), dict(x=reals(4, 3), sz=ints(4, 0))]),
    ("selection_by_a_matrix", "g (float[N,3] x, bool[N,3] m) => (float[K] y) { y=Compress(x,m) }",
     [dict(x=reals(2, 3), m=bools([1, 0, 1], [1, 1, 0]))]),
    ("step_of_a_slice", """g (float[N,3] x, int64[1] st) => (float[K,3] y) <int64[1] z={0}, int64[1] h={100}>
        { y=Slice(x,z,h,z,st) }""", [dict(x=reals(7, 3), st=ints(2)), dict(x=reals(5, 3), st=ints(3))]),
    ("scales_of_a_resize", 'g (float[1,1,N,M] x, float[4] sc) => (float[A,B,C,D] y) { y=Resize<mode="linear">(x,"",sc) }',
     [dict(x=reals(1, 1, 4, 4), sc=np.array([1, 1, 2, 1.5], np.float32))]),
    ("branches_of_unlike_ranks", """g (float[N,3] x, bool c) => (float[K] y) <int64[1] m={-1}, int64[2] p={-1,3}>
        { y=If(c)<then_branch: graph=t () => (float[A] a) { a=Reshape(x,m) },
        else_branch: graph=u () => (float[A,B] b) { b=Reshape(x,p) }> }""",
     [dict(x=reals(4, 3), c=np.array(True)), dict(x=reals(4, 3), c=np.array(False))]),
    ("backwards_from_before_the_beginning", """g (float[N] x) => (float[A] y)
        <int64[1] from={-5}, int64[1] to={-100}, int64[1] a={0}, int64[1] st={-2}> { y=Slice(x,from,to,a,st) }""",
     of_shapes((2,), (9,), (0,))),
    ("padded_many_times", "g (float[N] x) => (float[A] y) <int64[1] two={2}, int64[1] three={3}, int64[1] one={1}, int64[1] zero={0}> {"
     + "".join(f" s{i}=Shape(x{i}) t{i}=Add(s{i},two) u{i}=Div(t{i},three) v{i}=Mul(u{i},three) d{i}=Sub(v{i},s{i})"
               f" e{i}=Max(d{i},one) p{i}=Concat<axis=0>(zero,e{i}) x{i + 1}=Pad<mode=\"reflect\">(x{i},p{i})"
               for i in range(12)).replace("(x0", "(x") + " y=Neg(x12) }", of_shapes((5,), (6,), (7,), (40,))),
    ("branch_over_a_selection", """g (float[N] x) => (float[A,B] y)
        <int64[1] z={0}, int64[1] three={3}, int64[1] axis={1}, int64 five={5}>
        { c0=NonZero(x) c=Slice(c0,z,three,axis) f=Cast<to=1>(c) n=Size(c0) e=Greater(n,five)
        y=If(e)<then_branch: graph=t () => (float[P,Q] a) { q=NonZero(f) a=Cast<to=1>(q) }, else_branch: graph=u () => (float[R,S] b) { b=Exp(f) }> }""",
     of_shapes((2,), (4,), (7,), (9,))),
    ("loop_over_a_selection", """g (float[N] x, int64 n) => (float[A,B] y)
        <int64[1] z={0}, int64[1] three={3}, int64[1] axis={1}, bool go={1}>
        { c0=NonZero(x) c=Slice(c0,z,three,axis) f=Cast<to=1>(c)
        y=Loop(n,go,f)<body: graph=b (int64 i, bool c, float[P,Q] s) => (bool d, float[R,S] r) { d=Identity(c) q=NonZero(s) k=Size(q) m=Cast<to=1>(k) t=Add(s,f) r=Add(t,m) }> }""",
     [dict(x=reals(n), n=np.array(m)) for n, m in [(2, 1), (4, 3), (7, 2)]]),
    ("reshape_by_a_count", """g (float[N] x) => (int64[A,B] y) <int64[1] rest={-1}>
        { a=NonZero(x) xx=Concat<axis=0>(x,x) b=NonZero(xx) c=Concat<axis=1>(a,b) s=Shape<start=1,end=2>(a)
        t=Concat<axis=0>(rest,s) y=Reshape(c,t) }""", of_shapes((2,), (5,), (3,))),
    ("shape_of_a_sum", """g (float[N] x, float[M] z) => (int64[1] y, float[P] zeros)
        { t=Add(x,z) y=Shape(t) zeros=ConstantOfShape(y) }""",
     [dict(x=reals(n), z=reals(m)) for n, m in ((5, 5), (5, 1), (1, 4), (3, 3))]),
]


def main(folder):
    session_options = onnxruntime.SessionOptions()
    session_options.log_severity_level = 3
    for name, text, runs in MODELS:
        model = onnx.parser.parse_model(HEADER + text)
        here = os.path.join(folder, name)
        shutil.rmtree(here, ignore_errors=True)
        os.makedirs(here)
        onnx.save(model, os.path.join(here, "model.onnx"))
        session = onnxruntime.InferenceSession(model.SerializeToString(), session_options)
        for i, inputs in enumerate(runs):
            case = os.path.join(here, f"test_data_set_{i}")
            os.makedirs(case)
            outputs = dict(zip([o.name for o in model.graph.output], session.run(None, inputs)))
            for kind, values in [("input", inputs), ("output", outputs)]:
                for j, (value_name, value) in enumerate(values.items()):
                    with open(os.path.join(case, f"{kind}_{j}.pb"), "wb") as f:
                        f.write(numpy_helper.from_array(np.asarray(value), value_name).SerializeToString())


if __name__ == "__main__":
    main(sys.argv[1])
