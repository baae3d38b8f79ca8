"""What is crossed in the operations matrix: methods in both forms, at 16 bits and at low bits."""

from xquant.methods import METHODS

OWN = [name for name, method in METHODS.items() if method.__module__.startswith("xquant.")]
"""The library's methods: others may be registered beside them."""

IDENTITY = [
    "full:group=8",
    "kivi-16bit:group=8",
    "kivi-16bit:group=8,rope=post,sink=2",
    "int16:group=8",
    "nf16:group=8,rope=pre,tail=5",
    "asymkv:lk=0,lv=0,low=16,group=8,tail=0",
    "crosslayer:high=16,low=16,group=8,tail=0,sink=2",
    "kvquant-16bit:group=8",
    "xquant-16bit:group=8,form=mha",
    "xquant-16bit:group=8,form=gqa,sink=2",
    "xquant-cl-16bit:group=8,form=mha,first_bits=16,sink=2",
    "xquant-cl-16bit:group=8,form=gqa,first_bits=16,tail=5",
    "xquant-cl-16bit:group=8,form=mha,first_bits=16,stream=post",
]

ONE_OF_EACH = [
    "full:group=8",
    "kivi-16bit:group=8",
    "kivi-16bit:group=8,rope=post",
    "xquant-16bit:group=8,form=gqa",
    "xquant-16bit:group=8,form=mha",
    "xquant-cl-16bit:group=8,first_bits=16",
]
"""One of each codec, which loses nothing."""

LOW = [
    "kivi-2bit:group=8,sink=2",
    "kivi-1bit:group=8,rope=post",
    "kivi-4bit:group=8,layers=1x7+k5v3",
    "int3:group=8,tail=3",
    "nf2-gs5:group=8,keys=channel,rope=pre",
    "asymkv-1.5bit:group=8,tail=0",
    "crosslayer:group=8,tail=0,km=0,vm=0,kq=2,vq=0",
    "crosslayer:group=8,tail=0,merge=floor,gamma=0.7,km=2,vm=0,sink=2",
    "crosslayer:group=8,span=3,dominant=1,km=0,vm=0,kq=0,vq=0,tail=5",
    "kvquant-3bit-1%:group=8",
    "kvquant-3bit-0.1%:group=8,scales=offline",
    "kvquant-2bit-5%:group=8,per=matrix,weighting=fisher",
    "kvquant-2bit-5%:group=8,scales=online,weighting=none,sink=2",
    "kvquant-4bit:group=8,datatype=nf,tail=5",
    "xquant-3bit:group=8,form=mha,rotate=true",
    "xquant-2bit:group=8,form=gqa,outlier=true,tail=5",
    "xquant-4bit:group=8,form=gqa,rotate=true,first_layers=2,first_bits=8",
    "xquant-cl-2bit:group=8,form=mha,sink=2",
    "xquant-cl-2bit:group=8,form=mha,accumulator=4,rotate=true",
    "xquant-cl-3bit:group=8,form=gqa",
    "xquant-cl-1bit:group=8,form=gqa,stream=residual",
    "tc-2bit:group=16",
    "tc-2bit:group=16,basis=keys-first",
    "tc-2bit:group=32,classes=2",
    "tc-3.5bit:group=16,metric=identity,tail=5,sink=1",
    "tc-cl-1.5bit:group=16,sink=2",
    "tc-cl-4bit:group=16,basis=head,sink=0",
    "tc-cl-2bit:group=16,span=3,tail=5",
    "tc-cl-2bit:group=32,classes=2,sink=2",
    "turboquant-3bit:group=8,qjl=true,tail=5",
    "kvarn-k4v2:group=8,sink=2",
]

RIVALS = [
    "quarot-3bit:group=8,sink=2",
    "turboquant-2bit:group=8",
    "kvlinc-2bit:group=8,sink=2",
    "oscar-2bit:group=8,sink=2,tail=5",
    "q4_0:group=8,rope=pre",
    "q8_0:group=8,rotate=true,sink=1",
    "kvtc-4bit:group=8,tail=5,span=3",
    "nvfp4:group=8,sink=1,four=true",
    "pairs-3bit:group=8,tail=5",
    "e8-2bit:group=8,sink=2",
]
"""Of the codec and the quantizers of some in `LOW`: not crossed with everything."""
